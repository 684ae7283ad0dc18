"""Activations and their gradients (csrc/extensions/activation.cpp and bias.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.quantizers import Kind, kind_of, output, supports_any_gemm_layout
from analyzer.units import ceil_div

PLAIN: Final = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED: Final = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")
FUSED: Final[tuple[Kind, ...]] = ("delayed", "mxfp8")
"""Recipes for which these kernels write the quantized tensor directly."""


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
        """Return the sum over rows and the gradient, which is quantized if there is a quantizer."""
        bias, gradient = empty(input.shape[-1:], input.dtype), input.contiguous()
        if quantizer is None:
            return [bias, gradient]
        fused: tuple[Kind, ...] = (*FUSED, "tensorwise", "blockwise")  # all recipes quantize the gradient itself, without a copy
        out = output(quantizer, input.shape, input.dtype, gpu, fused=fused)
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
    """Return the workspace of kernels that cast and sum: one fp32 row per 128 input rows, or per 256 if they also transpose.

    Source: `nvte_quantize_dbias` (common/cast/fp8/quantize_fp8.cuh, mxfp8/quantize_mxfp8.cuh,
    transpose/cast_transpose_fusion.cu).
    """
    kind = kind_of(quantizer)
    if kind not in FUSED:
        return None
    transposes = kind == "delayed" and not supports_any_gemm_layout(gpu)
    if transposes and not (quantizer.rowwise_usage and quantizer.columnwise_usage):
        return None
    width = gradient.shape[-1]
    return empty((ceil_div(gradient.numel() // width, 256 if transposes else 128), width), torch.float32)
