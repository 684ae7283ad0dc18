"""The training script that stands between torchrun's options and Megatron's."""

from __future__ import annotations

from typing import Final

from analyzer.errors import UnsupportedError

GPT_SCRIPTS: Final = frozenset({"pretrain_gpt"})
OTHER_MODELS: Final = {
    "pretrain_bert": "BERT",
    "pretrain_t5": "T5",
    "pretrain_ict": "the retriever of ICT",
    "pretrain_biencoder": "the biencoder",
    "pretrain_retro": "RETRO",
    "pretrain_mamba": "Mamba",
    "pretrain_hybrid": "a hybrid of Mamba and attention",
    "pretrain_vlm": "a vision-language model",
    "pretrain_vision_classify": "a vision transformer",
    "pretrain_vision_inpaint": "a vision transformer",
    "pretrain_vision_dino": "a vision transformer",
    "pretrain_multimodal": "a multimodal model",
    "train_rl": "reinforcement learning",
    "train_mimo": "a multimodal model",
}
"""Scripts of Megatron-LM that build no GPT: what they train."""


def check_entry(entry: str, *, module: bool) -> str | None:
    """What is assumed of the script `entry`; None for Megatron's own GPT script.

    `module` says that it was named as a module (`-m`). Raises UnsupportedError for scripts of other models.
    """
    name = entry.rsplit(".", 1)[-1] if module else entry.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".py")
    if name in GPT_SCRIPTS:
        return None
    if name in OTHER_MODELS:
        raise UnsupportedError(entry, f"it trains {OTHER_MODELS[name]}, and only GPT is modelled", "use pretrain_gpt.py")
    if name.startswith("pretrain_") and "gpt" not in name:
        raise UnsupportedError(entry, "it is not known to train a GPT, and only GPT is modelled", "use pretrain_gpt.py")
    return f"{entry} builds its GPT model as Megatron's pretrain_gpt.py does."
