"""Temporary copies of scales in the layout that a GEMM requires; they are freed after the GEMM (csrc/util.cpp).

MXFP8 and NVFP4 scales are swizzled. GPUs since Blackwell do not support GEMMs with blocks of 128, so their scales are converted to
MXFP8 scales.
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


def swizzled(tensor: Any, *, rowwise: bool, gpu: Gpu) -> torch.Tensor | None:
    """Return the copied scales of an operand's rowwise or columnwise data; None if no copy is needed.

    Source: `swizzle_scaling_factors` and `convert_block_scaling_to_mxfp8_tensor`.
    """
    if _is_mxfp8(tensor) or _is_nvfp4(tensor):
        return None if _is_swizzled(tensor) else empty(_scales(tensor, rowwise=rowwise).shape, torch.uint8)
    if not _is_blockwise(tensor) or gpu.capability < (10, 0):
        return None
    *outer, width = logical_shape(tensor)
    rows = prod(outer)
    first, last = (rows, width) if rowwise else (width, rows)
    return empty((round_up(first, 128), ceil_div(last, 128) * 4), torch.uint8)


def swizzled_together(tensors: Sequence[Any], *, rowwise: bool, gpu: Gpu) -> list[torch.Tensor | None]:
    """Return the copied scales of a grouped GEMM (`multi_tensor_swizzle_scaling_factors`).

    MXFP8 and NVFP4 scales share one buffer. Converted block scales are separate.
    """
    if not tensors or not (_is_mxfp8(tensors[0]) or _is_nvfp4(tensors[0])) or _is_swizzled(tensors[0]):
        return [swizzled(tensor, rowwise=rowwise, gpu=gpu) for tensor in tensors]
    total = 0
    for tensor in tensors:
        total = round_up(total, 16) + _scales(tensor, rowwise=rowwise).numel()
    return [empty((total,), torch.uint8)]


def _scales(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    scales: torch.Tensor = tensor._rowwise_scale_inv if rowwise else tensor._columnwise_scale_inv
    return scales


def _is_mxfp8(tensor: Any) -> bool:
    return type(tensor).__name__ in ("MXFP8Tensor", "MXFP8TensorStorage", "MXFP8TensorBase")


def _is_swizzled(tensor: Any) -> bool:
    """Return whether the kernel that quantized the tensor wrote the scales as GEMMs need them (from 2.12 on)."""
    return bool(getattr(tensor, "_with_gemm_swizzled_scales", False))


def _is_nvfp4(tensor: Any) -> bool:
    return type(tensor).__name__ in ("NVFP4Tensor", "NVFP4TensorStorage")


def _is_blockwise(tensor: Any) -> bool:
    return type(tensor).__name__ in ("Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage", "Float8BlockwiseQTensorBase")
