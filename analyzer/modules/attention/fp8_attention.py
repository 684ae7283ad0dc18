"""cuDNN's attention with queries, keys and values in MXFP8, in forward and backward.

Queries, keys and values each have a row-wise copy, whose blocks of 32 elements are in a head, and a column-wise copy, whose blocks
are 32 tokens. Both stay for the backward, with their scales in [b, a, s, d]. The output and the gradients are in 16 bit, so the
gradient of the output is quantized in the backward. The 16-bit queries, keys and values are not saved.

Sources (Transformer Engine 2.17, the first with this is 2.15): pytorch/attention/dot_product_attention/backends.py FusedAttnFunc;
utils.py combine_and_quantize, mxfp8_quantize_fast_path, get_attention_quantizers; csrc/extensions/swizzle.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from analyzer.modules.tree import Module, Tensor
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.modules.shapes import Shapes

_BLOCK: Final = 32
"""Elements with one scale."""
_ALIGNMENT: Final = 16
"""Bytes to which the scales of each tensor in a common buffer are aligned."""


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values, or the gradient of the output: [s, b, heads, width]."""

    name: str
    heads: int
    width: int

    def copies(self, shapes: Shapes) -> tuple[Tensor, Tensor]:
        """The row-wise and the column-wise copy."""
        name = f"{self.name} in fp8"
        row = shapes.wide(name, self.heads * self.width, "a·d/t", dtype="fp8")
        return row, replace(row, name=f"{name}, column-wise")

    def scales(self, shapes: Shapes, *, by_columns: bool) -> int:
        """Bytes of the scales of a copy, one for each block, as the kernel reads them: padded in the last dimension."""
        tokens = shapes.s * shapes.b * self.heads
        if by_columns:
            return tokens // _BLOCK * round_up(self.width, 128)
        return tokens * round_up(self.width // _BLOCK, 4)


def _scales(shapes: Shapes, operands: Sequence[Operand], name: str) -> Iterator[Tensor]:
    """The scales of all `operands`, in one buffer for each kind of copy."""
    for by_columns in (False, True):
        size = 0
        for each in operands:
            size = round_up(size, _ALIGNMENT) + each.scales(shapes, by_columns=by_columns)
        kind = ", column-wise" if by_columns else ""
        yield Tensor(name=f"scales of {name} in fp8{kind}", shape=(size,), dtype="uint8", formula="mxfp8 scaling")


def _copies(shapes: Shapes, operands: Sequence[Operand], name: str) -> tuple[Tensor, ...]:
    return (*(copy for each in operands for copy in each.copies(shapes)), *_scales(shapes, operands, name))


def quantized_kernel(
    shapes: Shapes, kernel: Module, operands: Sequence[Operand], inputs: Sequence[Tensor], *, copied: tuple[Tensor, ...] = ()
) -> Module:
    """`kernel` with copies of the `operands` in FP8 instead of the 16-bit tensors that it saves, which are its `inputs`.

    `copied`: inputs that are made contiguous before they are quantized.
    """
    saved = tuple(each for each in kernel.saved if each not in inputs)
    first = next(index for index, each in enumerate(kernel.saved) if each in inputs)
    copies = _copies(shapes, operands, "query, key and value")
    gradient = next(each for each in kernel.backward_workspace if each.name == "output gradient")
    heads = operands[0].heads
    of_gradient = (Operand("output gradient", heads, prod(gradient.shape) // (shapes.s * shapes.b * heads)),)
    return replace(
        kernel,
        saved=(*saved[:first], *copies, *saved[first:]),
        forward_workspace=(*kernel.forward_workspace, *copied),
        backward_workspace=(*kernel.backward_workspace, *_copies(shapes, of_gradient, "output gradient")),
    )
