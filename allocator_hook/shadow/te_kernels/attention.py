"""cuDNN's fused attention and its helper kernels (csrc/extensions/attention.cpp).

Saved for backward: one fp32 softmax statistic per head and query, and two int64 of RNG state. cuDNN allocates its own
workspaces: non-deterministic backward accumulates dQ in fp32, as measured runs show, and on Hopper a deterministic one stores the
gradients of all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty, reject_quantizer
from allocator_hook.shadow.te_kernels.enums import ENUMS, DType
from allocator_hook.shadow.te_kernels.quantizers import kind_of
from allocator_hook.shadow.te_kernels.releases import is_before, with_names
from analyzer.modules.attention.cudnn import score_gradients_bytes, stores_score_gradients
from analyzer.units import round_up

LAYOUT = ENUMS["NVTE_QKV_Layout"]
_BACKEND = ENUMS["NVTE_Fused_Attn_Backend"]
_MASK = ENUMS["NVTE_Mask_Type"]
_SOFTMAX = ENUMS["NVTE_Softmax_Type"]


_BEFORE_TENSORS: Final = "bias_type attn_mask_type softmax_type>=2.8 window_size bottom_right_diagonal>=2.12 "
_TENSORS: Final = "cu_seqlens_q cu_seqlens_kv Q K V "
_FORWARD: Final = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout o_format>=2.15 qkv_scale_inv_format>=2.15 "
    f"{_BEFORE_TENSORS} {_TENSORS} fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k>=2.2 page_table_v>=2.2 "
    "s_quantizer o_quantizer attn_bias softmax_offset>=2.8"
)
_BACKWARD: Final = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout o_format>=2.15 do_format>=2.15 dqkv_layout>=2.15 "
    f"qkv_scale_inv_format>=2.15 do_scale_inv_format>=2.15 {_BEFORE_TENSORS} deterministic {_TENSORS} O dO fake_dtype"
)
_CHOICE: Final = (
    "is_training>=2.5 qkv_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type>=2.8 p_dropout num_attn_heads "
    "num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v"
)


def bindings(gpu: Gpu) -> Mapping[str, Callable[..., Any]]:
    def fused_attn_backend(qkv_dtype: int, head_dim_qk: int, head_dim_v: int) -> int:
        """Return the backend. Head sizes are those that cuDNN 9.5 and later support in training.

        Source: common/fused_attn/fused_attn.cpp.
        """
        max_head_dim = 256 if gpu.capability == (9, 0) else 128
        if qkv_dtype in (DType["kFloat8E4M3"], DType["kFloat8E5M2"]):
            return _BACKEND["NVTE_FP8" if gpu.capability >= (10, 0) else "NVTE_No_Backend"]
        half = qkv_dtype in (DType["kFloat16"], DType["kBFloat16"])
        fits = max(head_dim_qk, head_dim_v) <= max_head_dim or (head_dim_qk, head_dim_v) == (192, 128)
        if half and gpu.capability >= (8, 0) and fits and head_dim_qk % 8 == 0 and head_dim_v % 8 == 0:
            return _BACKEND["NVTE_F16_arbitrary_seqlen"]
        return _BACKEND["NVTE_No_Backend"]

    def with_reason(choice: Any) -> tuple[int, str]:
        """`choice` is a `FusedAttentionParams` of Python. Returns the backend and why there is none."""
        backend = fused_attn_backend(choice.qkv_dtype, choice.head_dim_qk, choice.head_dim_v)
        return backend, "" if backend != _BACKEND["NVTE_No_Backend"] else "not supported"

    return {
        "get_fused_attn_backend": with_names(fused_attn_backend, _CHOICE) if is_before("2.20") else with_reason,
        "fused_attn_fwd": with_names(fused_attn_fwd, _FORWARD),
        "fused_attn_bwd": with_names(fused_attn_bwd, _BACKWARD),
        "fa_prepare_fwd": fa_prepare_fwd,
        "fa_prepare_bwd": fa_prepare_bwd,
        "multi_tensor_transpose_to_bhsd": multi_tensor_transpose_to_bhsd,
        "multi_tensor_swizzle_scales_for_gemm_unchecked_": swizzle_in_place,
    }


def fused_attn_fwd(
    max_seqlen_q: int, attn_mask_type: int, window_size: Sequence[int], cu_seqlens_q: torch.Tensor, Q: torch.Tensor,
    K: torch.Tensor, V: torch.Tensor, fake_dtype: torch.dtype, o_quantizer: Any, softmax_offset: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the output, the softmax statistics [b, a, s, 1], the RNG state, and the softmax offset if there is one."""
    if kind_of(o_quantizer) != "mxfp8":  # whose output is in 16 bit (`quantizer_helper`)
        reject_quantizer(o_quantizer, "fused_attn_fwd")
    out = empty((*Q.shape[:-1], V.shape[-1]), fake_dtype)
    rng_state = empty((2,), torch.int64)
    batch, heads = cu_seqlens_q.shape[0] - 1, Q.shape[-2]
    calls.attention("forward", Q, K, V, batch=batch, causal=_is_causal(attn_mask_type), window=window_size[0])
    statistics = empty((batch, heads, max_seqlen_q, 1), torch.float32)
    return [out, statistics, rng_state, *(() if softmax_offset is None else (softmax_offset,))]


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, qkv_layout: int, attn_mask_type: int, window_size: Sequence[int],
    cu_seqlens_q: torch.Tensor, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, fake_dtype: torch.dtype,
    softmax_type: int = 0, deterministic: bool = False,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of query, key and value in their layout, then those of the bias (None) and the softmax offset."""
    layout = LAYOUT(qkv_layout).name.removeprefix("NVTE_")
    gradients = _split_gradients(layout, Q, K, V, fake_dtype)
    batch, heads = cu_seqlens_q.shape[0] - 1, Q.shape[-2]
    calls.attention("backward", Q, K, V, batch=batch, causal=_is_causal(attn_mask_type), window=window_size[0])
    # cuDNN computes the sum of dO·O per query and accumulates dQ, both in fp32, or stores the gradients of the scores
    scratch = [empty((batch, heads, max_seqlen_q), torch.float32)]
    if deterministic and stores_score_gradients(torch.cuda.get_device_capability(), deterministic=True):
        packed = layout.startswith("T")
        lengths = (Q.shape[0], K.shape[0]) if packed else (max_seqlen_q, max_seqlen_kv)
        size = score_gradients_bytes(batch=batch, heads=heads, queries=lengths[0], keys=lengths[1], packed=packed)
        scratch.append(empty((size,), torch.uint8))
    else:
        scratch.append(empty(Q.shape, torch.float32))
    del scratch
    learned = softmax_type == _SOFTMAX["NVTE_LEARNABLE_SOFTMAX"]
    return [*gradients, None, empty((1, heads, 1, 1), torch.float32) if learned else None]


def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[torch.Tensor | None], original_format: str, outputs: Sequence[torch.Tensor | None] | None = None
) -> list[torch.Tensor | None]:
    """Return [s, b, a, d] or [b, s, a, d] as [b, a, s, d], in `outputs` if they are given."""
    found: list[torch.Tensor | None] = []
    for index, tensor in enumerate(inputs):
        given = outputs[index] if outputs is not None else None
        if tensor is None or given is not None:
            found.append(given)
            continue
        sequence, batch = (tensor.shape[:2]) if original_format == "sbhd" else reversed(tensor.shape[:2])
        found.append(empty((batch, tensor.shape[2], sequence, tensor.shape[3]), tensor.dtype))
    return found


def swizzle_in_place(tensors: Sequence[Any], rowwise: bool, columnwise: bool) -> None:
    """Replace the scales of one kind of copy by swizzled ones, which share a buffer (csrc/extensions/swizzle.cpp)."""
    assert rowwise != columnwise
    name = "_rowwise_scale_inv" if rowwise else "_columnwise_scale_inv"
    scales = [getattr(tensor, name) for tensor in tensors]
    starts, size = [], 0
    for each in scales:
        starts.append(round_up(size, 16))
        size = starts[-1] + each.numel()
    buffer = empty((size,), torch.uint8)
    for tensor, start, each in zip(tensors, starts, scales, strict=True):
        setattr(tensor, name, buffer[start : start + each.numel()].view(each.shape))


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
