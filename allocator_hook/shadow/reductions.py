"""The buffers of PyTorch's sums on a GPU, in which thread blocks exchange partial results (Reduce.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from analyzer.modules.reduction import sum_buffer_bytes
from analyzer.specs.hardware import resident_threads

aten = torch.ops.aten

_SUMS: Final = frozenset({aten.sum.dim_IntList, aten.mean.dim})


def reduction_buffer(func: Any, args: Sequence[Any], gpu: Gpu) -> int:
    """Bytes of the buffer of an operation that sums floating-point numbers over other dimensions than the last; 0 if it has none.

    A sum over the last dimension stores one partial result for each block, which is not counted.
    """
    if func not in _SUMS or not args[0].is_meta or not args[0].is_floating_point() or not args[0].is_contiguous():
        return 0
    shape = tuple(args[0].shape)
    reduced = {each % len(shape) for each in args[1] or range(len(shape))}
    last = max((place for place, size in enumerate(shape) if size > 1), default=0)
    if not reduced or last in reduced or not prod(shape):
        return 0
    rows = prod(size for place, size in enumerate(shape) if place in reduced)
    inner = prod(shape[max(reduced) + 1 :])
    return sum_buffer_bytes(
        rows,
        prod(shape) // rows,
        multiprocessors=gpu.multiprocessors,
        threads=resident_threads(gpu.capability),
        adjacent=inner,
    )
