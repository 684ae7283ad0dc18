"""Hybrid models: a stack of layers of several types, such as Nemotron-H with Mamba, attention and FFN layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from analyzer.specs.model import BlockSpec

MAMBA_EXPANSION: Final = 2
"""Width of a Mamba layer relative to the hidden size, if the number of heads is not given (`MambaMixer`, expand)."""
CONVOLUTION_WIDTH: Final = 4
"""Tokens that the convolution of a Mamba layer reads (`MambaMixer`, d_conv)."""
SCAN_CHUNK: Final = 128
"""Tokens of a chunk of the scan (`MambaMixer`, chunk_size)."""


@dataclass(frozen=True, kw_only=True)
class LetterSpec:
    """A layer type of a hybrid pattern."""

    block: BlockSpec
    moe: bool = False
    """The feed-forward branch is a MoE layer."""


LETTERS: Final[dict[str, LetterSpec]] = {
    "M": LetterSpec(block=BlockSpec(attention="mamba", feed_forward="none")),
    "*": LetterSpec(block=BlockSpec(feed_forward="none")),
    "+": LetterSpec(block=BlockSpec(feed_forward="none")),
    "-": LetterSpec(block=BlockSpec(attention="none")),
    "E": LetterSpec(block=BlockSpec(attention="none"), moe=True),
}
"""By letter of a pattern: Mamba, attention, multi-latent attention, FFN, experts.

Source: `Symbols` of core/ssm/mamba_hybrid_layer_allocation.py (0.16.1) and core/models/hybrid/hybrid_layer_allocation.py (0.19).
"""
