"""Other bindings: versions, dropout, transposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from allocator_hook.shadow.gpu import CUDNN_VERSION, Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {
        "get_cudnn_version": lambda: CUDNN_VERSION,
        "get_cublasLt_version": lambda: 130_000,
        "get_stream_priority_range": lambda *_: (0, -5),
        "dropout_fwd": dropout_fwd,
        "dropout_bwd": dropout_bwd,
        "swap_first_dims": swap_first_dims,
        "fp8_transpose": fp8_transpose,
    }


def dropout_fwd(input: torch.Tensor, dropout_probability: float, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the output and a mask of one bit per element."""
    del dropout_probability
    out = like(input) if out is None else out
    return [out, empty((input.numel() // 8,), torch.uint8)]


def dropout_bwd(
    grad_output: torch.Tensor, mask: torch.Tensor, dropout_probability: float, grad_input: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of the input."""
    del mask, dropout_probability
    return like(grad_output) if grad_input is None else grad_input


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[a, b, …] -> [b, a, …], as a copy."""
    return empty((tensor.shape[1], tensor.shape[0], *tensor.shape[2:]), tensor.dtype) if out is None else out


def fp8_transpose(input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[…, columns] -> [columns, …], one byte per element."""
    del dtype
    return empty((input.shape[-1], *input.shape[:-1]), torch.uint8) if out is None else out
