"""From the model_type of a Hugging Face configuration to the function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.launch.info_options import MODEL
from analyzer.launch.model_config import (
    compressed,
    dense,
    experts,
    gemma,
    gpt_style,
    hybrid,
    latent,
    linear,
    llama_like,
    shared_experts,
)
from analyzer.launch.model_config.common import MegatronModel
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.refused import refusal
from analyzer.specs.vision_part import VISION_TYPES, ModelParts, VisionWeights

FAMILIES: Final[dict[str, Callable[[Configuration], MegatronModel]]] = {
    "llama": dense.llama,
    "granite": dense.granite,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "mimo": llama_like.mimo,
    "glm4": llama_like.glm4,
    "glm4v_text": llama_like.glm4,
    "qwen3": dense.qwen3,
    "gemma": dense.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma4_text": gemma.gemma4,
    "exaone4": llama_like.exaone4,
    "phi3": dense.phi3,
    "starcoder2": dense.starcoder2,
    "nemotron": dense.nemotron,
    "seed_oss": llama_like.seed_oss,
    "smollm3": llama_like.smollm3,
    "arcee": llama_like.arcee,
    "hunyuan_v1_dense": llama_like.hunyuan_dense,
    "ernie4_5": llama_like.ernie,
    "ministral": llama_like.ministral,
    "ministral3": llama_like.ministral,
    "stablelm": llama_like.stablelm,
    "gpt2": gpt_style.gpt2,
    "opt": gpt_style.opt,
    "gpt_neox": gpt_style.gpt_neox,
    "falcon": gpt_style.falcon,
    "mixtral": experts.mixtral,
    "qwen2_moe": experts.qwen_moe,
    "qwen3_moe": experts.qwen_moe,
    "qwen3_vl_text": dense.qwen3,
    "qwen3_vl_moe_text": experts.qwen_moe,
    "qwen2_vl_text": dense.qwen2,
    "qwen2_5_vl_text": dense.qwen2,
    "qwen2_5_omni_text": dense.qwen2,
    "qwen3_omni_moe_text": experts.qwen_moe,
    "gpt_oss": experts.gpt_oss,
    "glm4_moe": experts.glm4_moe,
    "glm4v_moe_text": experts.glm4_moe,
    "solar_open": shared_experts.solar,
    "dots1": shared_experts.dots,
    "ernie4_5_moe": shared_experts.ernie_moe,
    "hunyuan_v1_moe": shared_experts.hunyuan_moe,
    "granitemoe": shared_experts.granite_moe,
    "granitemoeshared": shared_experts.granite_moe,
    "llama4_text": shared_experts.llama4,
    "olmoe": shared_experts.olmoe,
    "minimax_m2": shared_experts.minimax_m2,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "kimi_k2": latent.deepseek_v3,
    "deepseek_v32": latent.deepseek_sparse,
    "glm_moe_dsa": latent.deepseek_sparse,
    "deepseek_v4": compressed.deepseek_v4,
    "glm4_moe_lite": latent.deepseek_v3,
    "nemotron_h": hybrid.nemotron_h,
    "granitemoehybrid": hybrid.granite_hybrid,
    "qwen3_next": linear.qwen3_next,
    "qwen3_5": linear.qwen3_5,
    "qwen3_5_text": linear.qwen3_5,
    "qwen3_5_moe": linear.qwen3_5_moe,
    "qwen3_5_moe_text": linear.qwen3_5_moe,
}
TEXT_MODELS: Final = frozenset({"llama4", "mistral3", "kimi_k25"})
"""Types with a vision encoder that is left out. Their language model is read from text_config."""


def megatron_model(config: Configuration) -> MegatronModel:
    """The model as options of Megatron-LM. Raises InputError for fields that are missing, UnsupportedError for other families."""
    kind = config.model_type
    if kind in FAMILIES and not (kind in VISION_TYPES and config.values.get("vision_config")):
        return FAMILIES[kind](config)
    if kind in VISION_TYPES:
        from analyzer.launch.model_config.vision_language import vision_language_model  # imported for such models only

        return vision_language_model(config, megatron_model)
    if kind in TEXT_MODELS and "text_config" in config.values:
        text, notes = linear.text_model(config)
        unread = VisionWeights(model=config.name, model_type=kind, weights=(), projection=())
        return replace(megatron_model(text).noting(*notes), parts=ModelParts(vision=unread))
    if (refused := refusal(config.name, kind)) is not None:
        raise refused
    if "vision_config" in config.values or "audio_config" in config.values:
        raise config.not_expressible(f"inputs other than text (model_type {kind})")
    raise UnsupportedError(
        MODEL,
        f"{config.name} has the model_type {kind!r}, which is not known",
        f"use one of {', '.join(FAMILIES)}, or write Megatron-LM's options",
    )
