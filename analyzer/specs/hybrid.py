"""Hybrid models: a stack of layers of several types, such as Nemotron-H with Mamba, attention and FFN layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from analyzer.specs.attention import AttentionKind
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
    attention: AttentionKind | None = None
    """Its attention, if that is not the full attention of the model."""
    since: str = "0.13"
    """The first release of Megatron core that has it."""


LETTERS: Final[dict[str, LetterSpec]] = {
    "M": LetterSpec(block=BlockSpec(attention="mamba", feed_forward="none")),
    "G": LetterSpec(block=BlockSpec(feed_forward="none"), attention="gated_delta_net", since="0.17"),
    "*": LetterSpec(block=BlockSpec(feed_forward="none")),
    "D": LetterSpec(block=BlockSpec(feed_forward="none"), since="0.18"),
    "+": LetterSpec(block=BlockSpec(feed_forward="none"), since="0.19"),
    "-": LetterSpec(block=BlockSpec(attention="none")),
    "E": LetterSpec(block=BlockSpec(attention="none"), moe=True, since="0.16"),
}
"""By letter of a pattern: Mamba, gated delta net, attention, DeepSeek sparse attention, multi-latent attention, FFN, experts.

Source: `Symbols` of core/ssm/mamba_hybrid_layer_allocation.py (0.13 to 0.17) and core/models/hybrid/hybrid_layer_allocation.py
(0.18, 0.19).
"""
