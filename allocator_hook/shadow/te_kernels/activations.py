"""Activations and their gradients (csrc/extensions/activation.cpp and bias.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like, refuse_quantizer

PLAIN: Final = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED: Final = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    table: dict[str, Callable[..., Any]] = {}
    for name in PLAIN:
        table[name], table["d" + name] = _forward(1), _backward
    for name in GATED:
        table[name], table["d" + name] = _forward(2), _backward
    table["clamped_swiglu"], table["clamped_dswiglu"] = _forward(2), _backward
    for name in PLAIN:
        table["dbias_d" + name] = _backward_with_bias
    table["bgrad_quantize"] = bgrad_quantize
    return table


def _forward(divisor: int) -> Callable[..., torch.Tensor]:
    def activation(input: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> torch.Tensor:
        refuse_quantizer(quantizer, "an activation")
        return empty((*input.shape[:-1], input.shape[-1] // divisor), input.dtype)

    return activation


def _backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *_: Any, **__: Any) -> torch.Tensor:
    del grad
    refuse_quantizer(quantizer, "the gradient of an activation")
    return like(fwd_input)


def _backward_with_bias(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[torch.Tensor]:
    refuse_quantizer(quantizer, "the gradient of an activation")
    return [empty(fwd_input.shape[-1:], grad.dtype), like(fwd_input)]


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[torch.Tensor]:
    """Without a quantizer: the sum over rows, and the gradient itself."""
    refuse_quantizer(quantizer, "bgrad_quantize")
    return [empty(input.shape[-1:], input.dtype), input.contiguous()]
