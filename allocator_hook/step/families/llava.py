"""Vision-language models: `model_provider`, `get_batch` and `forward_step` of pretrain_vlm.py (0.16.1) and examples/multimodal."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from allocator_hook.step.config import transformer_config
from allocator_hook.step.families.broadcast import broadcast_fields
from allocator_hook.step.families.ffn import submodules_of_ffn
from allocator_hook.step.families.scaled_layers import scaled_layer_spec
from allocator_hook.step.losses import loss_function
from allocator_hook.step.versions import accepted_by
from analyzer.specs import ModelSpec, RecomputeSpec, TrainingJob, VisionSpec

IMAGE_TOKEN: Final = -200
"""`DEFAULT_IMAGE_TOKEN_INDEX` of llava_model.py: the token in whose place the embeddings of an image are written."""


def vision_of(job: TrainingJob) -> VisionSpec:
    """Return the encoder and the projector of a job."""
    vision = job.model.vision
    assert vision is not None, "a vision-language model has an encoder"
    return vision


def llava_module(job: TrainingJob, config: Any, *, pre_process: bool, post_process: bool, virtual_stage: int | None) -> Any:
    """Return the LLaVAModel of one stage."""
    from megatron.core.models.multimodal import llava_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision import vit_layer_specs

    model, vision = job.model, vision_of(job)
    te = model.implementation == "transformer_engine"
    kind = "transformer_engine" if te else "local"
    layer = getattr(llava_spec, f"decoder_model_with_{kind}_default_spec")(None, False)
    encoder_layer = getattr(vit_layer_specs, f"get_vit_layer_with_{kind}_spec")()
    encoder, projector = _config_of(job, vision.encoder), _config_of(job, vision.projector)
    encoder.vision_model_type = vision.kind
    if vision.encoder.layer_scaling:
        encoder_layer = scaled_layer_spec(vision, encoder_layer)
    module = LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=layer,
        language_vocab_size=model.padded_vocab_size,
        language_max_sequence_length=model.max_position_embeddings,
        vision_transformer_config=encoder,
        vision_transformer_layer_spec=encoder_layer,
        drop_vision_class_token=vision.drops_class_tokens,
        vision_projection_config=projector,
        vision_projection_layer_spec=_projector_spec(layer, vision),
        vision_projection_type="mlp",
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        language_position_embedding_type=model.position_embedding,
        language_rotary_percent=model.rotary_percent,
        pre_process=pre_process,
        post_process=post_process,
        add_encoder=pre_process,
        add_decoder=True,
        img_h=vision.image_height,
        img_w=vision.image_width,
        patch_dim=vision.patch,
        pixel_shuffle=vision.pixel_shuffle,
        fp16_lm_cross_entropy=model.fp16_lm_cross_entropy,
        **_tile_tags(vision),
        **accepted_by(LLaVAModel.__init__, vp_stage=virtual_stage),
    )
    module.freeze(
        freeze_language_model="language_model" in model.frozen,
        freeze_vision_model="vision_model" in model.frozen,
        freeze_vision_projection="vision_projection" in model.frozen,
    )
    return module


def _tile_tags(vision: VisionSpec) -> dict[str, Any]:
    """Return the tags of the tiles, and a tokenizer with tags of as many tokens (`get_num_image_embeddings`)."""
    if not vision.tag_tokens:
        return {}
    tokenizer = {5: ("llama3p1", 0), 6: ("nemotron5", 0)}
    name, tiles = tokenizer.get(vision.tag_tokens, ("", 0))
    return {"tile_tags": [[0] * vision.tag_tokens] * vision.tiles, "max_num_tiles": tiles, "tokenizer_type": name}


def _config_of(job: TrainingJob, model: ModelSpec) -> Any:
    """Return the config of the encoder or of the projector, on the first stage and without sequence and context parallelism."""
    vision = vision_of(job)
    recompute = job.recompute
    if vision.recompute == "none":
        recompute = RecomputeSpec()
    elif vision.recompute == "all" and recompute.granularity == "full":
        recompute = replace(recompute, num_layers=vision.encoder.num_layers)
    config = transformer_config(replace(job, model=model, recompute=recompute))
    config.context_parallel_size = config.pipeline_model_parallel_size = 1
    config.sequence_parallel = False
    return config


def _projector_spec(layer: Any, vision: VisionSpec) -> Any:
    """Return the linear layers of the projector: those of the FFN of the language model, or without a norm."""
    submodules = deepcopy(submodules_of_ffn(layer.submodules))
    if not vision.normed_projector and vision.projector.implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        submodules.linear_fc1 = TEColumnParallelLinear
    return submodules


def llava_forward(job: TrainingJob, model: Any) -> tuple[Any, Any]:
    """Run the forward of one microbatch. Every stage has the complete batch. Each sample has an image before its text."""
    vision, samples = vision_of(job), job.batch.micro_batch_size
    size = (samples, vision.text_length)
    image = (samples * vision.tiles, 3, vision.image_height, vision.image_width)
    if vision.separate_fields:
        return _multimodal_forward(job, model, size, image)
    integers = broadcast_fields(dict.fromkeys(("tokens", "position_ids", "labels"), size))
    floats = broadcast_fields({"image": image, "loss_mask": size}, dtype=torch.float32)
    output, mask = model(
        floats["image"],
        integers["tokens"],
        integers["position_ids"],
        None,
        integers["labels"],
        floats["loss_mask"],
    )
    return output, partial(loss_function, job, mask)


def _multimodal_forward(job: TrainingJob, model: Any, size: tuple[int, int], image: tuple[int, ...]) -> tuple[Any, Any]:
    """Run the forward of one microbatch as `get_batch` and `forward_step` of examples/multimodal/train.py do."""
    samples, length = size
    tokens = broadcast_fields({"tokens": size})["tokens"]
    labels = broadcast_fields({"labels": (samples, length + 1)})["labels"]
    images = broadcast_fields({"imgs": image}, dtype=torch.float32)["imgs"]
    tiles = torch.full((samples,), vision_of(job).tiles, dtype=torch.int32, device="cuda")
    broadcast_fields({"num_tiles": (samples,)}, dtype=torch.int32)
    for name in ("cu_lengths", "max_lengths"):
        broadcast_fields({name: (1, 1)}, dtype=torch.int32)
    tokens = tokens.long()[:, :length].contiguous()
    labels = labels[:, 1 : length + 1].contiguous()
    positions = torch.arange(length, dtype=torch.long, device="cuda").unsqueeze(0).expand_as(tokens)
    loss_mask = torch.ones(labels.size(), dtype=torch.float, device="cuda")
    output, mask = model(images, tokens, positions, None, labels, loss_mask, num_image_tiles=tiles)
    return output, partial(loss_function, job, mask)
