"""GEMMs (csrc/extensions/gemm.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls, element_bits
from allocator_hook.shadow.te_kernels.allocate import empty
from allocator_hook.shadow.te_kernels.enums import TORCH_DTYPES
from allocator_hook.shadow.te_kernels.quantizers import create_tensor, kind_of, logical_shape, run_kernel
from allocator_hook.shadow.te_kernels.scales import swizzled, swizzled_together

STREAMS: Final = 4
"""Streams of a grouped GEMM (`nvte_get_num_compute_streams`)."""


def output_shape(a: Sequence[int], trans_a: bool, b: Sequence[int], trans_b: bool) -> tuple[int, ...]:
    """Return the shape of B·A in the row-major convention of the binding (`getGemmOutputShape`).

    >>> output_shape((12, 8), True, (5, 2, 8), False)
    (5, 2, 12)
    """
    a_rows = _rows(a)
    out = (b[-1],) if trans_b else tuple(b[:-1])
    return (*out, a_rows if trans_a else a[-1])


def gemm_sizes(a: Sequence[int], trans_a: bool, b: Sequence[int], trans_b: bool) -> tuple[int, int, int]:
    """Return rows, columns and depth of the product.

    >>> gemm_sizes((12, 8), True, (5, 2, 8), False)
    (10, 12, 8)
    """
    rows, depth = (b[-1], _rows(b)) if trans_b else (_rows(b), b[-1])
    return rows, _rows(a) if trans_a else a[-1], depth


def _rows(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def generic_gemm(
        A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: int | None,
        bias: torch.Tensor | None, bias_type: int, gelu: bool, gelu_in: torch.Tensor | None, grad: bool, workspace: torch.Tensor,
        workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
        extra_output: torch.Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return D, the bias gradient, the input of a fused GELU, and the extra output of an overlapped GEMM."""
        del gelu_in, workspace, workspace_size, use_split_accumulator, alpha, beta
        quantized = _is_quantized(A) or _is_quantized(B)
        dtype = TORCH_DTYPES[output_dtype] if output_dtype is not None else A.dtype  # type: ignore[index]
        sizes = gemm_sizes(logical_shape(A), transA, logical_shape(B), transB)
        parts = [sizes] if comm_overlap is None or bulk_overlap else comm_overlap.parts(sizes)
        calls.gemms(parts, bits=element_bits(A), accumulates=accumulate)
        if comm_overlap is not None:
            comm_overlap.communicate(comm_type)
        shape = output_shape(logical_shape(A), transA, logical_shape(B), transB)
        out = create_tensor(quantizer, shape, dtype, gpu) if D is None else D
        # FP8 GEMMs write FP8 output directly with delayed scaling only
        plain = empty(shape, dtype) if quantizer is not None and not (quantized and kind_of(quantizer) == "delayed") else None
        bias_grad = empty((logical_shape(B)[-1],), dtype if D is None else D.dtype) if bias is not None and grad else None
        before_gelu = empty(shape, TORCH_DTYPES[bias_type] if quantized else dtype) if gelu and not grad else None  # type: ignore[index]
        scales = [swizzled(A, rowwise=transA, gpu=gpu), swizzled(B, rowwise=not transB, gpu=gpu)]
        del scales
        if quantizer is not None:
            run_kernel(quantizer, shape, dtype)
        del plain
        return [out, bias_grad, before_gelu, extra_output]

    def te_general_grouped_gemm(
        A: list[Any], transa: bool, B: list[Any], transb: bool, D: list[torch.Tensor] | None, D_type: int,
        m_splits: list[int], bias: list[torch.Tensor], bias_type: int, single_output: bool, pre_gelu: Any, grad: bool,
        workspace: Any, workspace_size: int, accumulate: bool, *_: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return the bias gradients. Transformer Engine's modules always pass the output tensors in D."""
        del m_splits, bias_type, single_output, pre_gelu, grad, workspace, workspace_size
        sizes = [gemm_sizes(logical_shape(a), transa, logical_shape(b), transb) for a, b in zip(A, B, strict=True)]
        calls.gemms(sizes, bits=element_bits(A[0]), accumulates=accumulate)
        if D is None:
            for a, b in zip(A, B, strict=True):
                empty(output_shape(logical_shape(a), transa, logical_shape(b), transb), TORCH_DTYPES[D_type])  # type: ignore[index]
        pairs = [(a, b) for a, b in zip(A, B, strict=True) if prod(logical_shape(a)) and prod(logical_shape(b))]
        scales = [
            swizzled_together([a for a, _ in pairs], rowwise=transa, gpu=gpu),
            swizzled_together([b for _, b in pairs], rowwise=not transb, gpu=gpu),
        ]
        del scales
        return bias

    return {
        "generic_gemm": generic_gemm,
        "te_general_grouped_gemm": te_general_grouped_gemm,
        "get_num_cublas_streams": lambda: STREAMS,
    }


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer")
