"""Adapters that are trained beside a frozen model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AdapterTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
ADAPTER_TARGETS: Final[tuple[AdapterTarget, ...]] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers that can have an adapter, by the names of their modules in Megatron."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters (LoRA), one beside each linear layer with one of these names in every layer of the model."""

    rank: int
    targets: tuple[AdapterTarget, ...]
    """In the order of `ADAPTER_TARGETS`."""
    per_expert: bool = False
    """Each expert has its own adapter, as in ms-swift; otherwise those of a rank share one, as by default in Megatron-Bridge."""
    dropout: bool = False
    """Elements of the input of an adapter are dropped."""
