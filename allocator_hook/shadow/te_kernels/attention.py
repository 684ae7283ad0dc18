"""cuDNN's fused attention and its helper kernels (csrc/extensions/attention.cpp).

Saved for backward: one fp32 softmax statistic per head and query, and two int64 of RNG state. cuDNN allocates its own
workspaces: non-deterministic backward accumulates dQ in fp32, as measured runs show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty, reject_quantizer
from allocator_hook.shadow.te_kernels.enums import ENUMS, TORCH_DTYPES, DType

_LAYOUT = ENUMS["NVTE_QKV_Layout"]
_BACKEND = ENUMS["NVTE_Fused_Attn_Backend"]
_MASK = ENUMS["NVTE_Mask_Type"]
_SOFTMAX = ENUMS["NVTE_Softmax_Type"]


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def get_fused_attn_backend(
        is_training: bool, q_dtype: int, kv_dtype: int, qkv_layout: int, bias_type: int, attn_mask_type: int, softmax_type: int,
        p_dropout: float, num_attn_heads: int, num_gqa_groups: int, max_seqlen_q: int, max_seqlen_kv: int, head_dim_qk: int,
        head_dim_v: int, *_: Any,
    ) -> int:  # fmt: skip
        """Return the backend. Head sizes are those that cuDNN 9.5 and later support in training.

        Source: common/fused_attn/fused_attn.cpp.
        """
        max_head_dim = 256 if gpu.capability == (9, 0) else 128
        half = q_dtype in (DType["kFloat16"], DType["kBFloat16"])
        fits = max(head_dim_qk, head_dim_v) <= max_head_dim or (head_dim_qk, head_dim_v) == (192, 128)
        if half and gpu.capability >= (8, 0) and fits and head_dim_qk % 8 == 0 and head_dim_v % 8 == 0:
            return _BACKEND["NVTE_F16_arbitrary_seqlen"]
        return _BACKEND["NVTE_No_Backend"]

    return {
        "get_fused_attn_backend": get_fused_attn_backend,
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
        "fa_prepare_fwd": fa_prepare_fwd,
        "fa_prepare_bwd": fa_prepare_bwd,
    }


def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: int,
    bias_type: int, attn_mask_type: int, softmax_type: int, window_size: Sequence[int], cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Any, cu_seqlens_kv_padded: Any, page_table_k: Any, page_table_v: Any, s_quantizer: Any,
    o_quantizer: Any, *_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the output, the softmax statistics [b, a, s, 1] and the RNG state."""
    reject_quantizer(o_quantizer, "fused_attn_fwd")
    out = empty((*Q.shape[:-1], V.shape[-1]), fake_dtype)
    rng_state = empty((2,), torch.int64)
    batch, heads = cu_seqlens_q.shape[0] - 1, Q.shape[-2]
    calls.attention("forward", Q, K, V, batch=batch, causal=_is_causal(attn_mask_type), window=window_size[0])
    statistics = empty((batch, heads, max_seqlen_q, 1), torch.float32)
    return [out, statistics, rng_state]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: int, bias_type: int,
    attn_mask_type: int, softmax_type: int, window_size: Sequence[int], deterministic: bool, cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, O: torch.Tensor, dO: torch.Tensor,
    fake_dtype: torch.dtype, dqkv_type: int, *_: Any,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of query, key and value in their layout, then those of the bias (None) and the softmax offset."""
    dtype = TORCH_DTYPES[dqkv_type]  # type: ignore[index]
    layout = _LAYOUT(qkv_layout).name.removeprefix("NVTE_")
    gradients = _split_gradients(layout, Q, K, V, dtype)
    batch, heads = cu_seqlens_q.shape[0] - 1, Q.shape[-2]
    calls.attention("backward", Q, K, V, batch=batch, causal=_is_causal(attn_mask_type), window=window_size[0])
    # cuDNN computes the sum of dO·O per query and accumulates dQ, both in fp32
    scratch = [empty((batch, heads, max_seqlen_q), torch.float32), empty(Q.shape, torch.float32)]
    del scratch
    learned = softmax_type == _SOFTMAX["NVTE_LEARNABLE_SOFTMAX"]
    return [*gradients, None, empty((1, heads, 1, 1), torch.float32) if learned else None]


def _is_causal(attn_mask_type: int) -> bool:
    return "CAUSAL" in _MASK(attn_mask_type).name


def _split_gradients(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients as views of one tensor if query, key and value are interleaved, else as separate tensors.

    Source: `nvte_get_qkv_layout_group`.
    """
    if "_" not in layout:
        axis = q.dim() - (2 if "3H" in layout else 1)
        interleaved = empty((*q.shape[:axis], 3, *q.shape[axis:]), dtype)
        return [interleaved.select(axis, index) for index in range(3)]
    if layout.count("_") == 1:
        axis = k.dim() - (2 if "2H" in layout else 1)
        pair = empty((*k.shape[:axis], 2, *k.shape[axis:]), dtype)
        return [empty(q.shape, dtype), pair.select(axis, 0), pair.select(axis, 1)]
    return [empty(tensor.shape, dtype) for tensor in (q, k, v)]


def fa_prepare_fwd(qkvi: torch.Tensor) -> torch.Tensor:
    """[s, b, n, h·3] -> [3, b, s, n, h]."""
    s, b, n, h = qkvi.shape
    return empty((3, b, s, n, h), qkvi.dtype)


def fa_prepare_bwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Three of [s, b, n, h] -> [b, s, n, 3·h]."""
    del k, v
    s, b, n, h = q.shape
    return empty((b, s, n, 3 * h), q.dtype)
