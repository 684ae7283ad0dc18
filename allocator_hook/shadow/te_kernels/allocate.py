"""Creates uninitialized GPU tensors, as the bindings do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from analyzer.errors import AnalyzerError

OUTSIDE: Final[dict[int, torch.Tensor]] = {}
"""Tensors that PyTorch's allocator does not manage, by storage. They exist until the process ends."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`at::empty(shape, at::CUDA(dtype))`."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same shape and dtype."""
    return empty(tensor.shape, tensor.dtype)


def outside_allocator(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that a library allocates with the CUDA driver. The recorder ignores it."""
    with _disable_current_modes():
        tensor = empty(shape, dtype)
    OUTSIDE[tensor.untyped_storage()._cdata] = tensor
    return tensor


def reject_quantizer(quantizer: object, kernel: str) -> None:
    """Raise AnalyzerError if the kernel has a quantizer, which only attention in MXFP8 may have."""
    if quantizer is not None:
        raise AnalyzerError(f"--info-engine shadow: quantized output of {kernel} is not supported; use --info-engine formula")
