"""Matrix products (csrc/extensions/gemm.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, refuse_quantizer
from allocator_hook.shadow.te_kernels.enums import TORCH_DTYPES


def output_shape(a: Sequence[int], trans_a: bool, b: Sequence[int], trans_b: bool) -> tuple[int, ...]:
    """Shape of B·A in the row-major reading of the binding (`getGemmOutputShape`).

    >>> output_shape((12, 8), True, (5, 2, 8), False)
    (5, 2, 12)
    """
    a_rows = _rows(a)
    out = (b[-1],) if trans_b else tuple(b[:-1])
    return (*out, a_rows if trans_a else a[-1])


def _rows(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    del gpu
    return {"generic_gemm": generic_gemm, "te_general_grouped_gemm": te_general_grouped_gemm, "get_num_cublas_streams": lambda: 4}


def generic_gemm(
    A: torch.Tensor, transA: bool, B: torch.Tensor, transB: bool, D: torch.Tensor | None, quantizer: Any, output_dtype: int | None,
    bias: torch.Tensor | None, bias_type: int, gelu: bool, gelu_in: torch.Tensor | None, grad: bool, workspace: torch.Tensor,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: torch.Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> list[Any]:  # fmt: skip
    """D, then the bias gradient, the input of a fused GELU, and the extra output of an overlapped product."""
    del bias_type, gelu_in, workspace, workspace_size, accumulate, use_split_accumulator, comm_overlap, comm_type, bulk_overlap
    del alpha, beta
    refuse_quantizer(quantizer, "generic_gemm")
    dtype = TORCH_DTYPES[output_dtype] if output_dtype is not None else A.dtype  # type: ignore[index]
    shape = output_shape(A.shape, transA, B.shape, transB)
    out = empty(shape, dtype) if D is None else D
    bias_grad = empty((B.shape[-1],), out.dtype) if bias is not None and grad else None
    before_gelu = empty(shape, out.dtype) if gelu and not grad else None
    return [out, bias_grad, before_gelu, extra_output]


def te_general_grouped_gemm(
    A: list[torch.Tensor], transa: bool, B: list[torch.Tensor], transb: bool, D: list[torch.Tensor] | None, D_type: int,
    m_splits: list[int], bias: list[torch.Tensor], *rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs are made by the caller in every use by Transformer Engine's modules; only bias gradients are returned."""
    del m_splits, rest
    if D is None:
        for a, b in zip(A, B, strict=True):
            empty(output_shape(a.shape, transa, b.shape, transb), TORCH_DTYPES[D_type])  # type: ignore[index]
    return bias
