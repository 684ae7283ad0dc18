"""The part of flash-linear-attention (fla-core 0.6.0) that gated delta nets call, with the tensors that the package allocates.

Sources: fla/modules/norm/l2norm.py; fla/ops/gated_delta_rule/{chunk,chunk_fwd,wy_fast}.py;
fla/ops/common/{chunk_delta_h,chunk_o}.py; fla/ops/utils/cumsum.py.
Legend: b batch, s tokens, h heads, k and v elements of a head, n chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty, like
from allocator_hook.step.patching import Patch
from analyzer.specs import TrainingJob

CHUNK: Final = 64
"""Tokens of a chunk (`chunk_size`)."""
_BLOCK: Final = 128
"""Elements of a key head in one block of `chunk_bwd_kernel_dqkwg`, on GPUs from Ampere on in 16 bit."""


class L2Norm(torch.autograd.Function):
    """Saved for backward: the output, and 1/‖x‖ of each row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output, rstd = like(x), empty(x.shape[:-1], torch.float32)
        ctx.save_for_backward(output, rstd)
        calls.launched("l2norm_fwd", (x, output, rstd))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        output, rstd = ctx.saved_tensors
        gradient, found = grads[0].contiguous(), like(output)
        calls.launched("l2norm_bwd", (output, rstd, gradient, found))
        return found


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Each row of the last dimension, divided by its norm."""
    return L2Norm.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def _cumulative(g: torch.Tensor) -> torch.Tensor:
    """`chunk_local_cumsum`: sums within each chunk, in fp32."""
    sums = empty(g.shape, torch.float32)
    calls.launched("chunk_local_cumsum", (g, sums))
    return sums


def _representation(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, a: torch.Tensor, g: torch.Tensor) -> Any:
    """`recompute_w_u_fwd`: w [b, s, h, k] and u [b, s, h, v]."""
    w, u = empty((*v.shape[:-1], k.shape[-1]), k.dtype), like(v)
    calls.launched("recompute_w_u", (k, v, beta, a, g, w, u))
    return w, u


def _states(k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, g: torch.Tensor) -> Any:
    """`chunk_gated_delta_rule_fwd_h`: the state before each chunk [b, n, h, k, v], and new values [b, s, h, v]."""
    b, s, h, width = w.shape
    states = empty((b, -(-s // CHUNK), h, width, u.shape[-1]), k.dtype)
    values = like(u)
    calls.launched("chunk_gated_delta_rule_fwd_h", (k, w, u, g, states, values))
    return states, values


class GatedDeltaRule(torch.autograd.Function):
    """`ChunkGatedDeltaRuleFunction`. Saved: q, k, v, cumulative g in fp32, beta, and the inverse A [b, s, h, 64] of each chunk."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
        g = _cumulative(g)
        a = torch.zeros((*v.shape[:-1], CHUNK), dtype=k.dtype, device=k.device)
        calls.launched("chunk_gated_delta_rule_fwd_kkt_solve", (k, g, beta, a))
        w, u = _representation(k, v, beta, a, g)
        states, values = _states(k, w, u, g)
        output = like(v)
        calls.launched("chunk_fwd_o", (q, k, values, states, g, output))
        ctx.save_for_backward(q, k, v, g, beta, a)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta, a = ctx.saved_tensors
        do = grads[0].contiguous()
        w, u = _representation(k, v, beta, a, g)
        states, values = _states(k, w, u, g)
        local = like(do)
        calls.launched("chunk_bwd_dv_local", (q, k, g, do, local))
        of_states, dv = like(states), like(local)
        calls.launched("chunk_gated_delta_rule_bwd_dhu", (q, k, w, g, do, local, of_states, dv))
        del local
        wide = (*v.shape[:-1], k.shape[-1])
        dq, dk = empty(wide, q.dtype), empty(wide, k.dtype)
        dg = empty((-(-k.shape[-1] // _BLOCK), *g.shape), torch.float32)
        dw = like(w)
        calls.launched("chunk_bwd_dqkwg", (q, k, values, w, g, states, dv, do, of_states, dq, dk, dw, dg))
        dq, dk = _of_groups(dq, q), _of_groups(dk, k)
        dg = dg.sum(0)
        other, dv_of_inputs, other_g, db = empty(wide, k.dtype), like(v), like(g), like(beta)
        calls.launched("prepare_wy_repr_bwd", (k, v, beta, g, a, dw, dv, other, dv_of_inputs, db, other_g))
        dv = dv_of_inputs
        del dv_of_inputs
        dk.add_(_of_groups(other, k))
        dg.add_(other_g)
        return dq, dk, dv, _cumulative(dg), db


def _of_groups(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients of the value heads that share a key head; the gradient itself if each has its own."""
    b, s, heads, width = tensor.shape
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(b, s, heads, -1, width).sum(3)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[b, s, h, k] and [b, s, h, v] → [b, s, h, v]. Raises ValueError for options that Megatron does not use."""
    if any(value not in (None, False) for value in options.values()):
        raise ValueError(f"options of chunk_gated_delta_rule that the stand-in does not have: {options}")
    return GatedDeltaRule.apply(q, k, v, g, beta), None  # type: ignore[no-untyped-call]


class CausalConvolution(torch.autograd.Function):
    """`CausalConv1dFunction` on [b, s, d]. Saved: the input, which may be a view, and the weight [d, width]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        output = empty(x.shape, x.dtype)
        calls.launched("causal_conv1d_fwd", (x, weight, output))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        again = empty(x.shape, x.dtype)  # without the activation
        calls.launched("causal_conv1d_fwd", (x, weight, again))
        found = torch.empty_like(x)
        parts = empty((x.shape[0] * -(-x.shape[1] // CHUNK), *weight.shape), torch.float32)
        calls.launched("causal_conv1d_bwd", (x, again, weight, grads[0], found, parts))
        return found, parts.sum(0).to(weight.dtype)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
    """[b, s, d] → [b, s, d], with SiLU. Raises ValueError for options that Megatron does not use."""
    if any(value not in (None, False) for name, value in options.items() if name != "activation"):
        raise ValueError(f"options of causal_conv1d that the stand-in does not have: {options}")
    return CausalConvolution.apply(x, weight), None  # type: ignore[no-untyped-call]


def modules() -> dict[str, ModuleType]:
    """Return the modules of fla that megatron-core imports, by name."""
    names = ("fla", "fla.modules", "fla.modules.l2norm", "fla.modules.convolution", "fla.ops", "fla.ops.gated_delta_rule")
    made = {name: ModuleType(name) for name in names}
    for name in ("fla", "fla.modules", "fla.ops"):
        made[name].__path__ = []
    made["fla.modules.l2norm"].l2norm = l2norm  # type: ignore[attr-defined]
    made["fla.modules.convolution"].causal_conv1d = causal_conv1d  # type: ignore[attr-defined]
    made["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return made


def patches(job: TrainingJob) -> Iterator[Patch]:
    """Yield the patch of the gated norm, of which `torch.compile` compiles only what follows the norm of Transformer Engine.

    That norm is an autograd function with a kernel of its extension, which is not traced, so that the function is divided there.
    """
    if job.model.linear_attention is None:
        return
    module = import_module("megatron.core.ssm.gated_delta_net").GatedDeltaNet
    gated = torch.compile(_gated)

    def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normalized = self.out_norm(x.reshape(-1, x.shape[-1]))
        return gated(normalized, gate, self.act_fn, x.dtype)

    yield Patch(module, "_apply_gated_norm", gated_norm, "torch.compile does not trace the norm")


def _gated(normalized: torch.Tensor, gate: torch.Tensor, activation: Any, dtype: torch.dtype) -> torch.Tensor:
    product: torch.Tensor = normalized * activation(gate.reshape(-1, gate.shape[-1]).float())
    return product.to(dtype)
