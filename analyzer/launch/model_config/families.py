"""From the model_type of a Hugging Face configuration to the function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.launch.info_options import MODEL
from analyzer.launch.model_config import dense, experts, gpt_style, latent, linear
from analyzer.launch.model_config.common import MegatronModel
from analyzer.launch.model_config.configuration import Configuration

FAMILIES: Final[dict[str, Callable[[Configuration], MegatronModel]]] = {
    "llama": dense.llama,
    "granite": dense.granite,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma": dense.gemma,
    "phi3": dense.phi3,
    "starcoder2": dense.starcoder2,
    "nemotron": dense.nemotron,
    "gpt2": gpt_style.gpt2,
    "opt": gpt_style.opt,
    "gpt_neox": gpt_style.gpt_neox,
    "falcon": gpt_style.falcon,
    "mixtral": experts.mixtral,
    "qwen2_moe": experts.qwen_moe,
    "qwen3_moe": experts.qwen_moe,
    "gpt_oss": experts.gpt_oss,
    "glm4_moe": experts.glm4_moe,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "kimi_k2": latent.deepseek_v3,
    "qwen3_next": linear.qwen3_next,
    "qwen3_5": linear.qwen3_5,
    "qwen3_5_text": linear.qwen3_5,
    "qwen3_5_moe": linear.qwen3_5_moe,
    "qwen3_5_moe_text": linear.qwen3_5_moe,
}
REFUSED: Final = {
    "ALiBi positions": ("bloom", "mpt"),
    "an encoder": ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper", "marian", "m2m_100", "nllb_moe", "t5gemma"),
    "bidirectional attention": ("bert", "roberta", "deberta", "deberta_v2", "distilbert", "electra", "albert", "modernbert"),
    "state-space layers": (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "falcon_h1",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "nemotron_h",
        "granitemoehybrid",
    ),
    "linear attention of another kind": ("rwkv", "minimax", "kimi_linear", "recurrent_gemma"),
    "norms after attention and FFN": ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4"),
    "norms without weights": ("olmo",),
    "norms of q and k over all heads": ("olmoe", "minimax_m2"),
    "one norm for parallel attention and FFN": ("gptj", "codegen", "cohere", "cohere2", "phi"),
    "sparse attention": ("deepseek_v32", "glm_moe_dsa"),
    "attention in chunks": ("llama4_text",),
}
"""Types that are not modelled, by the part that the options of a GPT in Megatron-LM do not give."""


def megatron_model(config: Configuration) -> MegatronModel:
    """The model as options of Megatron-LM. Raises InputError for fields that are missing, UnsupportedError for other families."""
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind](config)
    if "vision_config" in config.values or "audio_config" in config.values:
        raise config.not_expressible(f"inputs other than text (model_type {kind})")
    for what, kinds in REFUSED.items():
        if kind in kinds:
            raise config.not_expressible(f"{what} (model_type {kind})")
    raise UnsupportedError(
        MODEL,
        f"{config.name} has the model_type {kind!r}, which is not known",
        f"use one of {', '.join(FAMILIES)}, or write Megatron-LM's options",
    )
