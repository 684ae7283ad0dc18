"""Weights that parts of many models for images and sound have: linear layers, convolutions and norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.specs.vision_part import VisionWeight

COLUMN: Final = 0
"""The dimension of the outputs, which column-parallel layers split."""
ROW: Final = 1
"""That of the inputs, which row-parallel layers split."""


def linear(
    name: str,
    outputs: int,
    inputs: int,
    *,
    copies: int = 1,
    bias: bool = True,
    split: int | None = None,
    window: tuple[int, ...] = (),
) -> Iterator[VisionWeight]:
    """A linear layer, or a convolution with a `window`."""
    yield VisionWeight(name=f"{name}.weight", shape=(outputs, inputs, *window), copies=copies, split=split, linear=not window)
    if bias:
        yield VisionWeight(name=f"{name}.bias", shape=(outputs,), copies=copies, split=0 if split == COLUMN else None)


def norm(name: str, width: int, *, copies: int = 1, bias: bool = True) -> Iterator[VisionWeight]:
    yield VisionWeight(name=f"{name}.weight", shape=(width,), copies=copies)
    if bias:
        yield VisionWeight(name=f"{name}.bias", shape=(width,), copies=copies)
