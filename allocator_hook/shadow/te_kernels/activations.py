"""Activations and their gradients (csrc/extensions/activation.cpp and bias.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.quantizers import Kind, output

PLAIN: Final = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED: Final = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")
FUSED: Final[tuple[Kind, ...]] = ("delayed", "mxfp8")
"""Recipes of which these kernels write quantized tensors themselves."""


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def forward(divisor: int) -> Callable[..., Any]:
        def activation(input: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
            return output(quantizer, (*input.shape[:-1], input.shape[-1] // divisor), input.dtype, gpu, fused=FUSED)

        return activation

    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
        del grad
        return output(quantizer, fwd_input.shape, fwd_input.dtype, gpu, fused=FUSED)

    def backward_with_bias(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        bias = empty(fwd_input.shape[-1:], grad.dtype)
        return [bias, output(quantizer, fwd_input.shape, grad.dtype, gpu, fused=FUSED)]

    def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
        """The sum over rows, and the gradient: quantized, or without a quantizer itself."""
        bias, whole = empty(input.shape[-1:], input.dtype), input.contiguous()
        if quantizer is None:
            return [bias, whole]
        every: tuple[Kind, ...] = (*FUSED, "tensorwise", "blockwise")  # none needs another plain tensor: the gradient is one
        return [bias, output(quantizer, input.shape, input.dtype, gpu, fused=every)]

    table: dict[str, Callable[..., Any]] = {"bgrad_quantize": bgrad_quantize}
    for name in PLAIN:
        table[name], table["d" + name], table["dbias_d" + name] = forward(1), backward, backward_with_bias
    for name in GATED:
        table[name], table["d" + name] = forward(2), backward
    table["clamped_swiglu"], table["clamped_dswiglu"] = forward(2), backward
    return table
