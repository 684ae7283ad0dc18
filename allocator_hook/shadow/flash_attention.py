"""flash-attn's interface (2.8), as far as Transformer Engine calls it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from allocator_hook.shadow.gpu import Gpu
from allocator_hook.shadow.te_kernels.allocate import empty, like
from analyzer.errors import AnalyzerError


class FlashAttention(torch.autograd.Function):
    """FlashAttnFunc of flash-attn 2 (flash_attn/flash_attn_interface.py 2.8, csrc/flash_attn/flash_api.cpp).

    Kept: query, key, value, output, softmax statistics [b, a, s] in fp32 and two int64 of RNG state. Backward
    accumulates dQ in fp32 over queries rounded up to 128 and heads rounded up to 32 (from 129 on: 64), and sums
    dO·O for each of these queries; with fewer key than query heads dK and dV are first made for every query head.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, multiprocessors: int, deterministic: bool
    ) -> torch.Tensor:
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        batch, queries, heads, _ = q.shape
        out = like(q)
        statistics = empty((batch, heads, queries), torch.float32)
        rng_state = empty((2,), torch.int64)
        ctx.save_for_backward(q, k, v, out, statistics, rng_state)
        ctx.multiprocessors, ctx.deterministic = multiprocessors, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, _, _ = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        batch, queries, heads, width = q.shape
        rounded = -(-queries // 128) * 128
        unit = 32 if width <= 128 else 64
        dq, dk, dv = like(q), like(k), like(v)
        sums = empty((batch, heads, rounded), torch.float32)
        splits = -(-ctx.multiprocessors // (batch * heads)) if ctx.deterministic else 1
        accumulated = empty((*((splits,) if splits > 1 else ()), batch, rounded, heads, -(-width // unit) * unit), torch.float32)
        expanded = [empty((batch, k.shape[1], heads, width), k.dtype) for _ in range(2)] if k.shape[2] != heads else []
        del grad, sums, accumulated, expanded
        return dq, dk, dv, None, None, None


def modules(gpu: Gpu) -> dict[str, ModuleType]:
    """Modules by the name under which they are imported."""
    interface = ModuleType("flash_attn.flash_attn_interface")

    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, *_: Any, deterministic: bool = False, **__: Any
    ) -> torch.Tensor:
        return FlashAttention.apply(q, k, v, dropout_p, gpu.multiprocessors, deterministic)  # type: ignore[no-any-return, no-untyped-call]

    interface.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    interface._flash_attn_forward = _flash_forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _flash_backward  # type: ignore[attr-defined]
    for name in ("flash_attn_varlen_func", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        setattr(interface, name, _refuse(name))
    package = ModuleType("flash_attn")
    package.__path__ = []
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    compiled = ModuleType("flash_attn_2_cuda")
    compiled.varlen_bwd = _refuse("varlen_bwd")  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface, "flash_attn_2_cuda": compiled}


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """`_flash_attn_forward` as context parallelism calls it: output, statistics, no score matrix, RNG state."""
    del k, v
    batch, queries, heads, _width = q.shape
    return like(q), empty((batch, heads, queries), torch.float32), empty((0,), q.dtype), empty((2,), torch.int64)


def _flash_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *_: Any, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """`_flash_attn_backward` as context parallelism calls it: the gradients are given, the scratch is its own."""
    del dout, v, out, softmax_lse, dq, dk, dv
    batch, queries, heads, width = q.shape
    rounded, unit = -(-queries // 128) * 128, 32 if width <= 128 else 64
    sums = empty((batch, heads, rounded), torch.float32)
    accumulated = empty((batch, rounded, heads, -(-width // unit) * unit), torch.float32)
    expanded = [empty((batch, k.shape[1], heads, width), k.dtype) for _ in range(2)] if k.shape[2] != heads else []
    del accumulated, expanded
    return sums


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise AnalyzerError(f"--info-engine shadow: flash-attn's {name} has no stand-in yet; use --info-engine formula")

    return refuse
