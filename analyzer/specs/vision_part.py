"""The vision part of a vision-language model that a framework trains: its weights, and what of them is trained.

Its activations depend on the images of the data, and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

VisionHolder = Literal["ms-swift", "Megatron-Bridge", "mbridge", "ROLL"]
"""The library that builds the vision part beside the language model."""
VISION_TYPES: Final = tuple(
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v_moe internvl internvl_chat".split()
)
"""The model_type of the configurations whose vision part is read."""


@dataclass(frozen=True, kw_only=True)
class VisionWeight:
    """Equal weights of a vision part."""

    name: str
    """The name in the module of transformers, with `*` for the number of a layer."""
    shape: tuple[int, ...]
    """Without parallelism."""
    copies: int = 1
    """Layers that have it."""
    split: int | None = None
    """The dimension that tensor-parallel ranks share in a module of Megatron; None if each has all of it."""
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Elements of all layers, without parallelism."""
        return self.copies * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class VisionWeights:
    """All weights of the vision part of a model."""

    model: str
    """The model, for messages."""
    model_type: str
    """That of its configuration."""
    weights: tuple[VisionWeight, ...]
    projection: tuple[str, ...]
    """The beginnings of the names of the weights of the projection."""

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        return sum(each.numel for each in self.weights)


@dataclass(frozen=True, kw_only=True)
class VisionTraining:
    """How a launch holds and trains the vision part of its model, if it has one."""

    holder: VisionHolder
    frozen: tuple[tuple[str, bool, str], ...] = ()
    """What the launch says of vision_model (the encoder), vision_projection and language_model: the name, whether it is frozen,
    and the setting. The defaults of the holder hold for the others."""
    uncounted: tuple[str, ...] = ()
    """Why more of it is trained than is counted, a fragment of a sentence each."""
