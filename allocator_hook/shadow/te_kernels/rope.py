"""Fused rotary position embeddings (csrc/extensions/apply_rope.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {
        "fused_rope_forward": _rotate,
        "fused_rope_backward": _rotate,
        "fused_qkv_rope_forward": fused_qkv_rope_forward,
        "fused_qkv_rope_backward": fused_qkv_rope_backward,
    }


def _rotate(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(input)


def fused_qkv_rope_forward(
    qkv: torch.Tensor, q_freqs: Any, k_freqs: Any, start_positions: Any, split: Sequence[int], *_: Any
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value as separate tensors. `split` has their widths within a query group."""
    del q_freqs, k_freqs, start_positions
    s, b, groups = qkv.shape[:3]
    return (
        empty((s, b, groups * split[0] // split[1], split[1]), qkv.dtype),
        empty((s, b, groups, split[1]), qkv.dtype),
        empty((s, b, groups, split[2]), qkv.dtype),
    )


def fused_qkv_rope_backward(
    q_grad: torch.Tensor, k_grad: torch.Tensor, v_grad: torch.Tensor, q_freqs: Any, k_freqs: Any, split: Sequence[int], *_: Any
) -> torch.Tensor:
    """Return the gradient of the fused projection, [s, b, groups, sum of the widths]."""
    del k_grad, v_grad, q_freqs, k_freqs
    s, b, heads = q_grad.shape[:3]
    return empty((s, b, heads * split[1] // split[0], sum(split)), q_grad.dtype)
