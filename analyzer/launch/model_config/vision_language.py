"""Multimodal models: the language model as options of Megatron-LM, and the weights of the parts for images and sound.

Of Qwen2.5-Omni and Qwen3-Omni the thinker is read, which is all that mcore-bridge and Megatron-Bridge build.
Sources: src/transformers/models/{qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_vl_moe,glm4v_moe,internvl,qwen2_5_omni,qwen3_omni_moe} of
transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from analyzer.launch.model_config.common import MegatronModel
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.gemma import with_images
from analyzer.launch.model_config.vision import vision_weights
from analyzer.specs.vision_part import ONE_POSITION

_LANGUAGE: Final = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""The family of the language model where its fields are those of the configuration itself, as in files before transformers 4.52."""
_TEXT: Final = ("text_config", "llm_config")
"""Where its fields are otherwise."""
_UNFUSED: Final = ("--no-rope-fusion",)
"""Fused kernels do not rotate by three positions of a token (`validate_rope_fusion_compatibility` of Megatron-Bridge)."""


def vision_language_model(config: Configuration, megatron_model: Callable[[Configuration], MegatronModel]) -> MegatronModel:
    """The model. `megatron_model` reads the configuration of the language model. Raises InputError for missing fields."""
    if thinker := config.table("thinker_config"):
        config = Configuration({**thinker, "model_type": config.model_type}, config.name)
    language = megatron_model(_language(config))
    if config.model_type == "gemma3":
        language = with_images(language)
    width = next(int(option[1]) for option in language.options if option[0] == "--hidden-size")
    options = (*language.options, *([] if config.model_type in ONE_POSITION else [_UNFUSED]))
    parts = replace(language.parts, vision=vision_weights(config, width=width))
    return replace(language, options=options, parts=parts)


def _language(config: Configuration) -> Configuration:
    tied = {"tie_word_embeddings": config.values["tie_word_embeddings"]} if "tie_word_embeddings" in config.values else {}
    for key in _TEXT:
        if text := config.table(key):
            kind = text.get("model_type", _LANGUAGE.get(config.model_type))
            return Configuration({**tied, **text, **({"model_type": kind} if kind else {})}, config.name)
    kind = _LANGUAGE.get(config.model_type)
    if kind is None:
        return config.nested(_TEXT[0])  # which says that it has no model_type
    return Configuration({**config.values, "model_type": kind}, config.name)
