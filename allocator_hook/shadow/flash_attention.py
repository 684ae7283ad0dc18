"""The part of flash-attn's interface (2.8) that Transformer Engine calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty, like
from analyzer.errors import AnalyzerError
from analyzer.modules.paged_attention import splits_of_keys


class FlashAttention(torch.autograd.Function):
    """FlashAttnFunc of flash-attn 2 (flash_attn/flash_attn_interface.py 2.8, csrc/flash_attn/flash_api.cpp).

    Saved for backward: query, key, value, output, softmax statistics [b, a, s] in fp32 and two int64 of RNG state.
    Backward allocates an fp32 accumulator for dQ, with the query count rounded up to 128 and the head size rounded up to 32
    (to 64 from 129 on), and the sum of dO·O for each of these queries. If there are fewer key heads than query heads, dK and
    dV are first computed for every query head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: tuple[bool, int],
        multiprocessors: int,
        deterministic: bool,
    ) -> torch.Tensor:
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        batch, queries, heads, _ = q.shape
        out = like(q)
        statistics = empty((batch, heads, queries), torch.float32)
        rng_state = empty((2,), torch.int64)
        ctx.save_for_backward(q, k, v, out, statistics, rng_state)
        ctx.multiprocessors, ctx.deterministic, ctx.mask = multiprocessors, deterministic, mask
        _record("forward", q, k, v, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, statistics, rng_state = ctx.saved_tensors  # the kernel reads all of them
        _record("backward", q, k, v, ctx.mask)
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        dq, dk, dv = like(q), like(k), like(v)
        scratch = _scratch(q, k, ctx.multiprocessors if ctx.deterministic else 0)
        del grad, scratch, out, statistics, rng_state
        return dq, dk, dv, None, None, None


def _scratch(q: torch.Tensor, k: torch.Tensor, multiprocessors: int) -> list[torch.Tensor]:
    """Return the workspaces of `mha_bwd`: sums of dO·O, the fp32 accumulator of dQ, and expanded dK and dV with GQA.

    In deterministic mode `multiprocessors` is the number of SMs, and dQ is accumulated in as many parts as fill them. In
    non-deterministic mode it is 0.
    """
    batch, queries, heads, width = q.shape
    rounded, unit = -(-queries // 128) * 128, 32 if width <= 128 else 64
    parts = max(1, -(-multiprocessors // (batch * heads)))
    sums = empty((batch, heads, rounded), torch.float32)
    accumulated = empty((*((parts,) if parts > 1 else ()), batch, rounded, heads, -(-width // unit) * unit), torch.float32)
    expanded = [empty((batch, k.shape[1], heads, width), k.dtype) for _ in range(2)] if k.shape[2] != heads else []
    return [sums, accumulated, *expanded]


def modules(gpu: Gpu) -> dict[str, ModuleType]:
    """Return the replacement modules by import name."""
    interface = ModuleType("flash_attn.flash_attn_interface")

    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, deterministic: bool = False, **options: Any
    ) -> torch.Tensor:
        return FlashAttention.apply(q, k, v, _mask(options), gpu.multiprocessors, deterministic)  # type: ignore[no-any-return, no-untyped-call]

    interface.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    interface._flash_attn_forward = _flash_forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _flash_backward(gpu.multiprocessors)  # type: ignore[attr-defined]
    for name in ("flash_attn_varlen_func", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        setattr(interface, name, _unsupported(name))
    package = ModuleType("flash_attn")
    package.__path__ = []
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.flash_attn_varlen_func = _paged_prefill  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = _paged_decode(gpu.multiprocessors)  # type: ignore[attr-defined]
    compiled = ModuleType("flash_attn_2_cuda")
    compiled.varlen_bwd = _unsupported("varlen_bwd")  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface, "flash_attn_2_cuda": compiled}


def _mask(options: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether the mask of a call is causal, and the number of keys before its own that a query attends to (-1: all)."""
    window = options["window_size"][0] if "window_size" in options else options.get("window_size_left", -1)
    return bool(options.get("causal", False)), int(window)


def _record(
    direction: Literal["forward", "backward"], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tuple[bool, int]
) -> None:
    causal, window = mask
    calls.attention(direction, q, k, v, batch=q.shape[0], causal=causal, window=window)


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """`_flash_attn_forward` as context parallelism calls it. Returns output, statistics, an empty score matrix, RNG state."""
    _record("forward", q, k, v, _mask(options))
    batch, queries, heads, _width = q.shape
    return like(q), empty((batch, heads, queries), torch.float32), empty((0,), q.dtype), empty((2,), torch.int64)


def _flash_backward(multiprocessors: int) -> Any:
    """`_flash_attn_backward` as context parallelism calls it. The caller allocates the gradients, the kernel its workspaces."""

    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        deterministic: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        del dout
        _record("backward", q, k, v, _mask(options))
        return _scratch(q, k, multiprocessors if deterministic else 0)[0]

    return backward


def _paged_prefill(q: torch.Tensor, *_: Any, block_table: torch.Tensor, **__: Any) -> torch.Tensor:
    """`flash_attn_varlen_func` with a paged cache: output, statistics [heads, queries] in fp32, and RNG state.

    Source: `mha_varlen_fwd` (csrc/flash_attn/flash_api.cpp, 2.8).
    """
    del block_table
    tokens, heads, _width = q.shape
    out, statistics, rng_state = like(q), empty((heads, tokens), torch.float32), empty((2,), torch.int64)
    del statistics, rng_state
    return out


def _paged_decode(multiprocessors: int) -> Any:
    """`flash_attn_with_kvcache` with a paged cache. It divides the keys of a request among SMs that would be idle.

    Source: `mha_fwd_kvcache` and `set_params_splitkv` (csrc/flash_attn/flash_api.cpp, 2.8).
    """

    def decode(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, block_table: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        del v_cache
        batch, queries, heads, width = q.shape
        groups, keys = k_cache.shape[-2], block_table.shape[-1] * k_cache.shape[-3]
        if queries == 1 and heads > groups:  # the heads of a group become queries of one head
            queries, heads = heads // groups, groups
        out, statistics = like(q), empty((batch, heads, queries), torch.float32)
        splits = splits_of_keys(batch * heads * -(-queries // 64), keys=keys, width=width, multiprocessors=multiprocessors)
        if splits > 1:
            rounded = -(-width // 32) * 32 if width <= 192 else 256
            parts = [empty((splits, batch, heads, queries, *each), torch.float32) for each in ((), (rounded,))]
            del parts
        del statistics
        return out

    return decode


def _unsupported(name: str) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise AnalyzerError(f"--info-engine shadow: flash-attn's {name} is not supported; use --info-engine formula")

    return fail
