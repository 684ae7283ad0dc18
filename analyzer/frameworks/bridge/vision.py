"""The vision part of a model in a ConfigContainer of Megatron-Bridge.

Sources: models/qwen_vl/{qwen25_vl,qwen3_vl,qwen35_vl}_provider.py, models/glm_vl/glm_45v_provider.py and
models/gemma_vl/gemma3_vl_provider.py, models/ministral3/, models/nemotron_vl/ and models/nemotron_omni/ of Megatron-Bridge, August
2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.adapters import bridge_vision
from analyzer.frameworks.containers import TARGET, Tree
from analyzer.frameworks.options import is_true
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.vision import vision_weights
from analyzer.specs.model import FROZEN_PARTS
from analyzer.specs.vision_part import NEMOTRON, ONE_POSITION, VisionTraining, VisionWeights
from analyzer.units import natural

PROVIDERS: Final[Mapping[str, str]] = {
    "Qwen25VLModelProvider": "qwen2_5_vl",
    "Qwen3VLModelProvider": "qwen3_vl",
    "Qwen3VLMoEModelProvider": "qwen3_vl_moe",
    "Qwen35VLModelProvider": "qwen3_5",
    "Qwen35VLMoEModelProvider": "qwen3_5_moe",
    "GLM45VModelProvider": "glm4v_moe",
    "Gemma3VLModelProvider": "gemma3",
    "Ministral3ModelProvider": "mistral3",
    "Gemma4VLModelProvider": "gemma4",
    "KimiK25VLModelProvider": "kimi_k25",
    "NemotronVLModelProvider": "NemotronH_Nano_VL_V2",
    "NemotronOmniModelProvider": "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronOmniLlavaModelProvider": "NemotronH_Nano_Omni_Reasoning_V3",
}
"""The model_type of a configuration by the class of a provider."""
_READ: Final = frozenset({
    "vision_config", "hf_text_config", "return_dict", "mrope_section", "bos_token_id", "eos_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id",
    "video_start_token_id", "video_end_token_id", "language_max_sequence_length", "patch_size", "temporal_patch_size",
    "in_channels", "vision_dp_when_cp", "use_hf_vision_model",
    "spatial_merge_size", "num_position_embeddings", "out_hidden_size", "deepstack_visual_indexes", "pretrained_model_name",
    "head_dim", "mlp_only_layers", "decoder_sparse_step", "add_encoder", "add_decoder", "hetereogenous_dist_checkpoint",
    "vision_cuda_graph_scope", "max_vision_cuda_graph_seq_length", "modality_keys", "vision_projector_config",
    "text_config", "audio_config", "vision_soft_tokens_per_image", "audio_token_id", "mm_tokens_per_image", "hf_model_path",
    "media_placeholder_token_id", "pad_token_id", "ignore_index",
    "is_vision_language", "hf_config", *(f"freeze_{part}" for part in FROZEN_PARTS),
})  # fmt: skip
"""Fields of the vision part and of its tokens, which are read here or have no effect on the memory of the language model."""
_OF_NEMOTRON: Final = (
    "radio_", "sound_", "has_sound", "vision_", "temporal_", "language_model_type", "img_", "dynamic_resolution", "freeze_",
    "use_vision_backbone_fp8_arch", "separate_video_embedder", "nemotron_omni_contract", "tokenizer_type", "image_token_index",
)  # fmt: skip
"""Beginnings of the fields of Nemotron's parts for images and sound."""
_SMALLEST_IMAGE: Final = 256
"""Pixels of a side to which processors of Qwen enlarge smaller images."""
_NO_GRAPHS: Final = ("vision_cuda_graph_impl", "none")


class Vision(NamedTuple):
    """The vision part, and the fields of the language model."""

    weights: VisionWeights | None
    training: VisionTraining | None
    model: Tree


def read_vision(model: Tree) -> Vision:
    """The vision part of the fields of a provider. Raises UnsupportedError for one that is built otherwise."""
    name = str(model.get(TARGET, "")).rpartition(".")[2]
    kind = PROVIDERS.get(name)
    if kind is None:
        return Vision(None, None, model)
    if kind in NEMOTRON:
        return _nemotron(model, kind, name)
    apart = model.get("dist_train")
    if is_true(model.get("use_hf_vision_model")) or (isinstance(apart, Mapping) and is_true(apart.get("use_dist_train"))):
        fault = "a vision part of transformers, or on other GPUs than the language model, is not modelled"
        raise UnsupportedError("model", fault, "leave out model.use_hf_vision_model and model.dist_train.use_dist_train")
    whole = model.get("hf_config")
    whole = whole if isinstance(whole, Mapping) else {}
    given = model.get("vision_config") or whole.get("vision_config")
    if kind in ("gemma3", "gemma4", "kimi_k25") and not isinstance(given, Mapping):
        raise InputError("model.vision_config", f"{given!r} has no sizes of the vision part", "give the complete ConfigContainer")
    fields: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    inner = fields.get("config_dict")
    fields = {key: value for key, value in (inner if isinstance(inner, Mapping) else fields).items() if key != TARGET}
    vision = {"hidden_size": 1152 if kind.startswith("qwen3") else None, **fields}
    values = {**_of_projector(whole), "model_type": kind, "vision_config": vision}
    weights = _weights(Configuration(values, name), model)
    training = bridge_vision({key: value for key, value in model.items() if key.startswith("freeze_")}, "model.")
    if kind in ONE_POSITION:
        return Vision(weights, training, {key: value for key, value in model.items() if key not in _READ})
    # three positions of a token, which fused kernels do not rotate by; they save no tensor more than one
    language = {key: value for key, value in model.items() if key not in _READ and (key, value) != _NO_GRAPHS}
    if kind == "qwen3_vl_moe" and (natural(str(model.get("tensor_model_parallel_size"))) or 1) > 1:
        language["sequence_parallel"] = True  # `Qwen3VLMoEModelProvider.finalize`
    return Vision(weights, training, language | {"position_embedding_type": "rope", "apply_rope_fusion": False})


def image_tokens(model: Tree, dataset: Tree) -> int | None:
    """The most tokens of a sequence that images of a mock dataset become; None for other datasets and models.

    A processor of Qwen rounds the sides to a multiple of a merged patch, and enlarges small images to 256 × 256 pixels.
    """
    kind, vision = PROVIDERS.get(str(model.get(TARGET, "")).rpartition(".")[2], ""), model.get("vision_config")
    size, number = dataset.get("image_size"), natural(str(dataset.get("num_images", 1)))
    is_mock = str(dataset.get(TARGET, "")).endswith(".MockVLMSFTDatasetConfig")
    if not (is_mock and kind.startswith("qwen") and isinstance(vision, Mapping) and isinstance(size, list) and number):
        return None
    fields = {name: natural(str(vision.get(name, default))) for name, default in (("patch_size", 16), ("spatial_merge_size", 2))}
    side = prod(each or 1 for each in fields.values())
    sides = [natural(str(each)) or 0 for each in size]
    return number * prod(-(-max(each, _SMALLEST_IMAGE) // side) + 1 for each in sides)


def _nemotron(model: Tree, kind: str, name: str) -> Vision:
    """RADIO and Parakeet beside a hybrid. The fields of the provider are those of its own configuration."""
    values: Tree = {"model_type": kind}
    if "vision_proj_ffn_hidden_size" in model:
        values["projector_hidden_size"] = model["vision_proj_ffn_hidden_size"]
    if model.get("vision_class_token_len") is not None:
        values["class_tokens"] = model["vision_class_token_len"]
    for field, known in (("vision_model_type", "radio"), ("sound_model_type", "parakeet")):
        encoder = str(model.get(field) or known)
        if encoder.partition("_")[0] != known:  # such as parakeet_encoder
            fault = f"an encoder of the type {encoder!r} is not modelled beside a hybrid of Nemotron"
            raise UnsupportedError(f"model.{field}", fault, f"use {known}")
    if is_true(model.get("has_sound")):
        if not isinstance(model.get("sound_config"), Mapping):
            fault = f"{model.get('sound_config')!r} has no sizes of the encoder of sound"
            raise InputError("model.sound_config", fault, "give the complete ConfigContainer, or write model.has_sound=false")
        sound = {key: value for key, value in model["sound_config"].items() if key != TARGET}
        values["sound_config"] = sound | {"projection_hidden_size": model.get("sound_projection_hidden_size", 4096)}
    if is_true(model.get("separate_video_embedder")) and (natural(str(model.get("temporal_patch_dim"))) or 1) > 1:
        values |= {"separate_video_embedder": True, "video_temporal_patch_size": model["temporal_patch_dim"]}
    weights = _weights(Configuration(values, name), model)
    training = bridge_vision({key: value for key, value in model.items() if key.startswith("freeze_")}, "model.")
    return Vision(weights, training, {key: value for key, value in model.items() if not key.startswith(_OF_NEMOTRON)})


def _weights(config: Configuration, model: Tree) -> VisionWeights | None:
    """The weights of the fields of a provider. An error names the provider in place of an option."""
    try:
        return vision_weights(config, width=natural(str(model.get("hidden_size"))) or 1)
    except InputError as error:
        raise type(error)("model", error.fault, error.remedy) from error


def _of_projector(config: Mapping[str, Any]) -> Tree:
    """Fields of a whole configuration of transformers, which Mistral 3 has, that its projector is built by."""
    names = ("spatial_merge_size", "multimodal_projector_bias", "vision_feature_layer")
    return {name: config[name] for name in names if name in config}
