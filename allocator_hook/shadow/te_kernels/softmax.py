"""Fused softmax of attention scores (csrc/extensions/softmax.cpp). Forward allocates its output; backward is in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import like

VARIANTS: Final = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)


def forward(input: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the probabilities, [b, a, s, s] or [b·a, s, s], in the dtype of the scores."""
    return like(input)


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the gradient, which overwrites the incoming gradient."""
    del softmax_results
    return output_grads.contiguous()


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {f"{name}_{way}": kernel for name in VARIANTS for way, kernel in (("forward", forward), ("backward", backward))}
