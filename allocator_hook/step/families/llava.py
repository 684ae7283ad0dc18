"""Vision-language models: `model_provider`, `get_batch` and `forward_step` of pretrain_vlm.py (0.16.1)."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, Final

import torch

from allocator_hook.step.families.broadcast import broadcast_fields
from allocator_hook.step.losses import loss_function
from allocator_hook.step.versions import accepted_by
from analyzer.specs import TrainingJob, VisionSpec

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
    encoder, projector = deepcopy(config), deepcopy(config)
    encoder.num_layers, encoder.vision_model_type = vision.encoder.num_layers, vision.kind
    for other in (encoder, projector):
        other.context_parallel_size = other.pipeline_model_parallel_size = 1
        other.sequence_parallel = False
    module = LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=layer,
        language_vocab_size=model.padded_vocab_size,
        language_max_sequence_length=model.max_position_embeddings,
        vision_transformer_config=encoder,
        vision_transformer_layer_spec=encoder_layer,
        drop_vision_class_token=vision.drops_class_tokens,
        vision_projection_config=projector,
        vision_projection_layer_spec=deepcopy(layer.submodules.mlp.submodules),
        vision_projection_type="mlp",
        parallel_output=True,
        language_position_embedding_type=model.position_embedding,
        language_rotary_percent=model.rotary_percent,
        pre_process=pre_process,
        post_process=post_process,
        add_encoder=pre_process,
        add_decoder=True,
        img_h=vision.image_height,
        img_w=vision.image_width,
        patch_dim=vision.patch,
        **accepted_by(LLaVAModel.__init__, vp_stage=virtual_stage),
    )
    module.freeze(
        freeze_language_model="language_model" in model.frozen,
        freeze_vision_model="vision_model" in model.frozen,
        freeze_vision_projection="vision_projection" in model.frozen,
    )
    return module


def llava_forward(job: TrainingJob, model: Any) -> tuple[Any, Any]:
    """Run the forward of one microbatch. Every stage has the complete batch. Each sample has an image before its text."""
    vision, samples = vision_of(job), job.batch.micro_batch_size
    size = (samples, vision.text_length)
    integers = broadcast_fields(dict.fromkeys(("tokens", "position_ids", "labels"), size))
    image = (samples * vision.tiles, 3, vision.image_height, vision.image_width)
    floats = broadcast_fields({"image": image, "loss_mask": size}, dtype=torch.float32)
    packed = None
    output, mask = model(
        floats["image"],
        integers["tokens"],
        integers["position_ids"],
        None,
        integers["labels"],
        floats["loss_mask"],
        packed_seq_params=packed,
    )
    return output, partial(loss_function, job, mask)
