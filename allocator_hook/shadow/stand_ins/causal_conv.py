"""causal-conv1d (1.6.1): the causal convolution of each channel of [b, d, s], with the tensors that the package allocates.

Source: `CausalConv1dFn` of causal_conv1d/causal_conv1d_interface.py, and csrc/causal_conv1d.cpp.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty

PACKAGE = "causal_conv1d"


class CausalConvolution(torch.autograd.Function):
    """Saved for backward: the input, which is contiguous in its channels or tokens, and the parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        output = torch.empty_like(x)
        calls.launched("causal_conv1d_fwd", (x, weight, output))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gradient = grads[0]
        if x.stride(2) == 1:
            gradient = gradient.contiguous()
        elif gradient.stride(1) != 1:
            gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
        found = torch.empty_like(x)
        of_weight = empty(weight.shape, torch.float32)  # atomic sums
        of_bias = None if bias is None else empty(bias.shape, torch.float32)
        calls.launched("causal_conv1d_bwd", (x, weight, gradient, found, of_weight))
        return found, of_weight.type_as(weight), None if of_bias is None else of_bias.type_as(bias), None


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """[b, d, s] → [b, d, s]. `weight` has [d, width]."""
    assert seq_idx is None
    assert initial_states is None
    assert final_states_out is None
    assert not return_final_states
    return CausalConvolution.apply(x, weight, bias, activation)  # type: ignore[no-any-return,no-untyped-call]


def modules() -> dict[str, ModuleType]:
    """Return the package by its import name."""
    module = ModuleType(PACKAGE)
    module.__path__ = []
    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    module.causal_conv1d_update = None  # type: ignore[attr-defined]
    return {PACKAGE: module}
