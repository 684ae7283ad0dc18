"""Kernels that process lists of tensors: Adam, SGD, norms, scaling (csrc/extensions/multi_tensor)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty

IN_PLACE: Final = (
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_adam",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_sgd",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
)
_BLOCKS: Final = 320


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {
        **dict.fromkeys(IN_PLACE, _in_place),
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_unscale_l2norm": multi_tensor_unscale_l2norm,
    }


def _in_place(*_: Any) -> None:
    """Update the arguments in place; allocate nothing."""


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the total norm as one fp32 element, and the norm of each tensor if `per_tensor` (else an empty tensor)."""
    del noop_flag
    partial = empty((_BLOCKS,), torch.float32)
    total = empty((1,), torch.float32)
    if not per_tensor:
        return total, empty((0,), torch.float32)
    tensors = tensor_lists[0]
    chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors)
    partial_per_tensor = empty((len(tensors) * chunks,), torch.float32)
    norms = empty((len(tensors),), torch.float32)
    del partial, partial_per_tensor
    return total, norms


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As multi_tensor_l2norm, for gradients multiplied by `inv_scale`."""
    del inv_scale
    return multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
