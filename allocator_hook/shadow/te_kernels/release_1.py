"""Bindings of Transformer Engine 1, which releases from 2.0 on have with other arguments (pytorch/csrc/extensions, 1.11).

Python allocates the outputs of GEMMs. Some functions are TorchScript operators, in `torch.ops.tex_ts`. FP8 is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls, element_bits
from allocator_hook.shadow.te_kernels import attention, norms
from allocator_hook.shadow.te_kernels.enums import TORCH_DTYPES, DType
from allocator_hook.shadow.te_kernels.gemm import gemm_sizes
from allocator_hook.shadow.te_kernels.releases import with_names
from analyzer.errors import AnalyzerError

_FACTORS: Final = "A A_scale_inverse A_fp8_tensor A_type transa B B_scale_inverse B_fp8_tensor B_type transb D "
_OPTIONS: Final = "D_scale D_type D_amax bias bias_type pre_gelu_out grad workspace workspaceSize accumulate"
_BEFORE_TENSORS: Final = "bias_type attn_mask_type window_size "
_SCALES: Final = "attn_scale p_dropout set_zero qkv_layout "
_DTYPES: Final = {torch.float16: DType["kFloat16"], torch.bfloat16: DType["kBFloat16"], torch.float32: DType["kFloat32"]}


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    """The bindings of the module."""
    table = dict(norms.bindings(gpu))
    of_layer_norm, of_rms_norm = table["layernorm_fwd"], table["rmsnorm_fwd"]

    def layernorm_fwd(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *options: Any) -> list[torch.Tensor]:
        return list(of_layer_norm(input, weight, bias, options[0], None, None, _DTYPES[input.dtype], *options[1:]))

    def rmsnorm_fwd(input: torch.Tensor, weight: torch.Tensor, *options: Any) -> list[torch.Tensor]:
        out, _, rsigma = of_rms_norm(input, weight, options[0], None, None, _DTYPES[input.dtype], *options[1:])
        return [out, rsigma]

    def layernorm_fwd_noalloc(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *options: Any
    ) -> list[torch.Tensor]:
        return list(of_layer_norm(input, weight, bias, options[0], out, None, _DTYPES[input.dtype], *options[1:]))

    def rmsnorm_fwd_noalloc(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *options: Any) -> list[torch.Tensor]:
        _, _, rsigma = of_rms_norm(input, weight, options[0], out, None, _DTYPES[input.dtype], *options[1:])
        return [out, rsigma]

    def layernorm_fwd_inf(input: torch.Tensor, *options: Any) -> torch.Tensor:
        return layernorm_fwd(input, *options)[0]

    def rmsnorm_fwd_inf(input: torch.Tensor, *options: Any) -> torch.Tensor:
        return rmsnorm_fwd(input, *options)[0]

    return {
        "layernorm_fwd": layernorm_fwd,
        "layernorm_fwd_noalloc": layernorm_fwd_noalloc,
        "layernorm_fwd_inf": layernorm_fwd_inf,
        "rmsnorm_fwd": rmsnorm_fwd,
        "rmsnorm_fwd_noalloc": rmsnorm_fwd_noalloc,
        "rmsnorm_fwd_inf": rmsnorm_fwd_inf,
        "fused_attn_fwd": with_names(
            fused_attn_fwd,
            f"max_seqlen_q max_seqlen_kv is_training {_SCALES}{_BEFORE_TENSORS}cu_seqlens_q cu_seqlens_kv Q K V",
        ),
        "fused_attn_bwd": with_names(
            fused_attn_bwd, f"max_seqlen_q max_seqlen_kv {_SCALES}{_BEFORE_TENSORS}deterministic cu_seqlens_q cu_seqlens_kv Q K V"
        ),
        "fused_attn_fwd_qkvpacked": with_names(
            fused_attn_fwd_qkvpacked, f"max_seqlen is_training {_SCALES}{_BEFORE_TENSORS}cu_seqlens QKV"
        ),
        "fused_attn_bwd_qkvpacked": with_names(
            fused_attn_bwd_qkvpacked, f"max_seqlen {_SCALES}{_BEFORE_TENSORS}deterministic cu_seqlens QKV"
        ),
        "fused_attn_fwd_kvpacked": with_names(
            fused_attn_fwd_kvpacked,
            f"max_seqlen_q max_seqlen_kv is_training {_SCALES}{_BEFORE_TENSORS}cu_seqlens_q cu_seqlens_kv Q KV",
        ),
        "fused_attn_bwd_kvpacked": with_names(
            fused_attn_bwd_kvpacked,
            f"max_seqlen_q max_seqlen_kv {_SCALES}{_BEFORE_TENSORS}deterministic cu_seqlens_q cu_seqlens_kv Q KV",
        ),
    }


def operators(gpu: Gpu) -> SimpleNamespace:
    """The TorchScript operators (csrc/ts_fp8_op.cpp)."""
    table = bindings(gpu)
    return SimpleNamespace(
        layernorm_fwd_inf_ts=table["layernorm_fwd_inf"],
        rmsnorm_fwd_inf_ts=table["rmsnorm_fwd_inf"],
        te_gemm_ts=with_names(te_gemm, _FACTORS + _OPTIONS),
        te_grouped_gemm_ts=with_names(te_grouped_gemm, f"{_FACTORS}D_offset {_OPTIONS}"),
    )


def te_gemm(A: torch.Tensor, A_type: int, transa: bool, B: torch.Tensor, transb: bool, accumulate: bool) -> None:
    """D = B·A. Python has allocated D, the bias gradient and the input of a fused GELU."""
    _reject_fp8(A_type)
    calls.gemms([gemm_sizes(A.shape, transa, B.shape, transb)], bits=element_bits(A), accumulates=accumulate)


def te_grouped_gemm(
    A: Sequence[torch.Tensor], A_type: int, transa: bool, B: Sequence[torch.Tensor], transb: bool, accumulate: bool
) -> None:
    """D = B·A for each expert."""
    _reject_fp8(A_type)
    sizes = [gemm_sizes(a.shape, transa, b.shape, transb) for a, b in zip(A, B, strict=True)]
    calls.gemms(sizes, bits=element_bits(A[0]), accumulates=accumulate)


def _reject_fp8(dtype: int) -> None:
    if TORCH_DTYPES[dtype] is torch.uint8:  # type: ignore[index]
        raise AnalyzerError("--info-engine shadow: FP8 needs Transformer Engine 2 or later; use --info-engine formula")


def fused_attn_fwd(
    max_seqlen_q: int, attn_mask_type: int, window_size: Sequence[int], cu_seqlens_q: torch.Tensor,
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the output, the softmax statistics and the RNG state."""
    return attention.fused_attn_fwd(max_seqlen_q, attn_mask_type, window_size, cu_seqlens_q, Q, K, V, Q.dtype, None)


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int],
    cu_seqlens_q: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, deterministic: bool = False,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of query, key, value and bias."""
    gradients = attention.fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, qkv_layout, attn_mask_type, window_size, cu_seqlens_q, Q, K, V, Q.dtype,
        deterministic=deterministic,
    )  # fmt: skip
    return gradients[:4]


def fused_attn_fwd_qkvpacked(
    max_seqlen: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int], cu_seqlens: torch.Tensor, QKV: torch.Tensor
) -> list[torch.Tensor]:
    """Like `fused_attn_fwd` for one tensor with query, key and value."""
    q, k, v = _unpacked(QKV, qkv_layout)
    return fused_attn_fwd(max_seqlen, attn_mask_type, window_size, cu_seqlens, q, k, v)


def fused_attn_bwd_qkvpacked(
    max_seqlen: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int], cu_seqlens: torch.Tensor, QKV: torch.Tensor,
    deterministic: bool = False,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of the packed tensor and of the bias."""
    q, k, v = _unpacked(QKV, qkv_layout)
    gradient, _, _, bias = fused_attn_bwd(
        max_seqlen, max_seqlen, qkv_layout, attn_mask_type, window_size, cu_seqlens, q, k, v, deterministic
    )
    return [None if gradient is None else _whole(gradient, QKV), bias]


def fused_attn_fwd_kvpacked(
    max_seqlen_q: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int], cu_seqlens_q: torch.Tensor,
    Q: torch.Tensor, KV: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """Like `fused_attn_fwd` for one tensor with key and value."""
    return fused_attn_fwd(max_seqlen_q, attn_mask_type, window_size, cu_seqlens_q, Q, *_unpacked(KV, qkv_layout))


def fused_attn_bwd_kvpacked(
    max_seqlen_q: int, max_seqlen_kv: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int],
    cu_seqlens_q: torch.Tensor, Q: torch.Tensor, KV: torch.Tensor, deterministic: bool = False,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of the query, of the packed tensor and of the bias."""
    k, v = _unpacked(KV, qkv_layout)
    query, packed, _, bias = fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, qkv_layout, attn_mask_type, window_size, cu_seqlens_q, Q, k, v, deterministic
    )
    return [query, None if packed is None else _whole(packed, KV), bias]


def _unpacked(packed: torch.Tensor, qkv_layout: int) -> tuple[torch.Tensor, ...]:
    """The dimension of query, key and value is the third last ("SB3HD") or the second last ("SBH3D")."""
    layout = attention.LAYOUT(qkv_layout).name.removeprefix("NVTE_")
    return packed.unbind(packed.dim() - (3 if "3H" in layout or "2H" in layout else 2))


def _whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor in the shape of `like` that begins with `part`."""
    strides = tuple(prod(like.shape[axis + 1 :]) for axis in range(like.dim()))
    return part.as_strided(like.shape, strides, 0)
