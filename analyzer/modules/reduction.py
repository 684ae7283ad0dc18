"""The buffer of a sum in PyTorch that several thread blocks compute together: a partial result of each thread.

Source: `setReduceConfig` and `ReduceConfig` in ATen/native/cuda/Reduce.cuh (PyTorch 2.13), with the constants for CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.modules.tree import Tensor, for_weight
from analyzer.specs.hardware import resident_threads
from analyzer.units import ceil_div

if TYPE_CHECKING:
    from analyzer.modules.shapes import Shapes

VECTOR: Final = 4
"""Adjacent columns that a thread sums at most."""
_ACCUMULATOR: Final = 4
"""Bytes of a partial sum of elements in fp32, fp16 or bf16."""
_MAX_THREADS: Final = 512
_WARP: Final = 32
_FEWEST_VALUES: Final = 16
"""Rows that a thread has at least if blocks divide them."""
_MOST_VALUES: Final = 256
"""Rows of a thread from which on blocks divide them."""


def sum_buffer_bytes(rows: int, columns: int, *, multiprocessors: int, threads: int, adjacent: int = 0) -> int:
    """Bytes of the buffer of a sum over the rows of a contiguous matrix [rows, columns]; 0 if no two blocks share a sum.

    `threads`: those that a multiprocessor has at a time. `adjacent`: columns that are adjacent in memory, if not all are.
    A block has a thread for each group of adjacent columns, and as many rows at a time as it has threads left. Blocks divide the
    rows until all multiprocessors have work. Each stores the sums of its columns, but the buffer has room for one of each pair of
    a column and of a thread of the row of the block.
    """
    vector = VECTOR
    while (adjacent or columns) % vector:
        vector //= 2
    most = _MAX_THREADS // vector
    width, height = _power_of_two(columns // vector, most), _power_of_two(rows, most)
    height = min(height, most // min(width, _WARP))
    width = min(width, most // height)
    if rows < min(height * 16, _MOST_VALUES):
        return 0
    of_thread = ceil_div(rows, height)
    grid, places = ceil_div(columns // vector, width), multiprocessors * (threads // (width * height))
    if of_thread < _MOST_VALUES or grid > places:
        return 0
    fill = min(ceil_div(places, grid), ceil_div(of_thread, _FEWEST_VALUES))
    blocks = max(fill, ceil_div(of_thread, _MOST_VALUES))
    return _ACCUMULATOR * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two(value: int, most: int) -> int:
    """The largest power of two that is not above `value` nor above `most`."""
    return most if value >= most else 1 << (value.bit_length() - 1)


def sum_buffer(shapes: Shapes, *, rows: int, columns: int, freed: int = 0) -> tuple[Tensor, ...]:
    """The buffer of the sum over the rows of [rows, columns], the gradient of a bias; empty if it needs none.

    `freed`: bytes that are freed before, in whose place it is: only what it needs beyond them is counted.
    """
    inputs = shapes.inputs
    threads = resident_threads(inputs.compute_capability)
    size = max(0, sum_buffer_bytes(rows, columns, multiprocessors=inputs.multiprocessors, threads=threads) - freed)
    buffer = Tensor(
        name="partial sums of the bias gradient",
        shape=(size,),
        dtype="uint8",
        formula="partial results of each thread (Reduce.cuh)",
    )
    return for_weight((buffer,)) if size else ()


def bias_gradient(shapes: Shapes, *, rows: int, columns: int) -> tuple[Tensor, ...]:
    """What the gradient of a bias allocates if PyTorch sums the gradient of the output over its rows."""
    gradient = Tensor(name="bias gradient", shape=(columns,), dtype=shapes.dtype, formula="size of the bias")
    return (*for_weight((gradient,)), *sum_buffer(shapes, rows=rows, columns=columns))
