"""Activations and their gradients (csrc/extensions/activation.cpp and bias.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.quantizers import Kind, kind_of, multiplies_any_layout, output
from analyzer.units import ceil_div

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
        out = output(quantizer, fwd_input.shape, grad.dtype, gpu, fused=FUSED)
        bias = empty(fwd_input.shape[-1:], grad.dtype)
        scratch = _partial_sums(fwd_input, quantizer, gpu)
        del scratch
        return [bias, out]

    def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
        """The sum over rows, and the gradient: quantized, or without a quantizer itself."""
        bias, whole = empty(input.shape[-1:], input.dtype), input.contiguous()
        if quantizer is None:
            return [bias, whole]
        every: tuple[Kind, ...] = (*FUSED, "tensorwise", "blockwise")  # none needs another plain tensor: the gradient is one
        out = output(quantizer, input.shape, input.dtype, gpu, fused=every)
        scratch = _partial_sums(input, quantizer, gpu)
        del scratch
        return [bias, out]

    table: dict[str, Callable[..., Any]] = {"bgrad_quantize": bgrad_quantize}
    for name in PLAIN:
        table[name], table["d" + name], table["dbias_d" + name] = forward(1), backward, backward_with_bias
    for name in GATED:
        table[name], table["d" + name] = forward(2), backward
    table["clamped_swiglu"], table["clamped_dswiglu"] = forward(2), backward
    return table


def _partial_sums(gradient: torch.Tensor, quantizer: Any, gpu: Gpu) -> torch.Tensor | None:
    """What kernels that cast and sum at once keep: a row for each 128 rows, or 256 where they transpose too.

    `nvte_quantize_dbias`: common/cast/fp8/quantize_fp8.cuh, mxfp8/quantize_mxfp8.cuh, transpose/cast_transpose_fusion.cu.
    """
    kind = kind_of(quantizer)
    if kind not in FUSED:
        return None
    transposes = kind == "delayed" and not multiplies_any_layout(gpu)
    if transposes and not (quantizer.rowwise_usage and quantizer.columnwise_usage):
        return None
    width = gradient.shape[-1]
    return empty((ceil_div(gradient.numel() // width, 256 if transposes else 128), width), torch.float32)
