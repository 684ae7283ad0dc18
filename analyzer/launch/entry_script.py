"""The training script, which is between torchrun's options and Megatron's."""

from __future__ import annotations

from typing import Final

from analyzer.errors import UnsupportedError

GPT_SCRIPTS: Final = frozenset({"pretrain_gpt"})
OTHER_MODELS: Final = {
    "pretrain_bert": "BERT",
    "pretrain_t5": "T5",
    "pretrain_ict": "the ICT retriever",
    "pretrain_biencoder": "a biencoder",
    "pretrain_retro": "RETRO",
    "pretrain_mamba": "Mamba",
    "pretrain_hybrid": "a Mamba hybrid",
    "pretrain_vlm": "a vision-language model",
    "pretrain_vision_classify": "a vision transformer",
    "pretrain_vision_inpaint": "a vision transformer",
    "pretrain_vision_dino": "a vision transformer",
    "pretrain_multimodal": "a multimodal model",
    "train_rl": "reinforcement learning",
    "train_mimo": "a multimodal model",
}
"""The models of Megatron-LM's other training scripts."""


def check_entry(entry: str, *, module: bool) -> str | None:
    """The assumption about the script `entry`; None for Megatron's own GPT script.

    `module`: it is given as a module (`-m`). Raises UnsupportedError for scripts that train other models.
    """
    name = entry.rsplit(".", 1)[-1] if module else entry.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
    if name in GPT_SCRIPTS:
        return None
    if name in OTHER_MODELS:
        raise UnsupportedError(entry, f"trains {OTHER_MODELS[name]}, and only GPT is modelled", "use pretrain_gpt.py")
    if name.startswith("pretrain_") and "gpt" not in name:
        raise UnsupportedError(entry, "is not a known GPT training script, and only GPT is modelled", "use pretrain_gpt.py")
    return f"{entry} is assumed to build its GPT model as Megatron's pretrain_gpt.py does."
