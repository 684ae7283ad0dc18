"""Scales that a product reads in an order of its own, copied for the time of the product (csrc/util.cpp).

Scales of MXFP8 are reordered. Blocks of 128, which GPUs from Blackwell on cannot multiply, are given scales of MXFP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.quantizers import logical_shape
from analyzer.units import ceil_div, round_up


def swizzled(tensor: Any, *, by_rows: bool, gpu: Gpu) -> torch.Tensor | None:
    """`swizzle_scaling_factors` and `convert_block_scaling_to_mxfp8_tensor`, for one of the two copies of an operand."""
    if _is_mxfp8(tensor):
        return empty(_scales(tensor, by_rows=by_rows).shape, torch.uint8)
    if not _is_blockwise(tensor) or gpu.capability < (10, 0):
        return None
    *outer, width = logical_shape(tensor)
    rows = prod(outer)
    first, last = (rows, width) if by_rows else (width, rows)
    return empty((round_up(first, 128), ceil_div(last, 128) * 4), torch.uint8)


def swizzled_together(tensors: Sequence[Any], *, by_rows: bool, gpu: Gpu) -> list[torch.Tensor | None]:
    """`multi_tensor_swizzle_scaling_factors`: of a grouped product, in one buffer; converted blocks lie apart."""
    if not tensors or not _is_mxfp8(tensors[0]):
        return [swizzled(tensor, by_rows=by_rows, gpu=gpu) for tensor in tensors]
    total = 0
    for tensor in tensors:
        total = round_up(total, 16) + _scales(tensor, by_rows=by_rows).numel()
    return [empty((total,), torch.uint8)]


def _scales(tensor: Any, *, by_rows: bool) -> torch.Tensor:
    scales: torch.Tensor = tensor._rowwise_scale_inv if by_rows else tensor._columnwise_scale_inv
    return scales


def _is_mxfp8(tensor: Any) -> bool:
    return type(tensor).__name__ in ("MXFP8Tensor", "MXFP8TensorStorage")


def _is_blockwise(tensor: Any) -> bool:
    return type(tensor).__name__ in ("Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage")
