"""The part of mamba-ssm (2.3) and causal-conv1d (1.6) that the Mamba layers of megatron-core call in a training step.

Each function allocates the tensors that the package allocates around its Triton and CUDA kernels, with the same lifetimes.

Sources: mamba_ssm/ops/triton/{ssd_combined,ssd_chunk_scan,ssd_chunk_state,ssd_state_passing,ssd_bmm,layernorm_gated}.py
(2.3.2.post1); causal_conv1d/{causal_conv1d_interface,cpp_functions}.py (1.6.0).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from allocator_hook.shadow.kernel_calls import calls
from allocator_hook.shadow.te_kernels.allocate import empty, like
from analyzer.errors import AnalyzerError

_SMALLEST_ROWS: Final = 32
"""Rows of the smallest block among the configurations of the kernels (`BLOCK_SIZE_M`, `BLOCK_SIZE_min`)."""
_SMALLEST_COLUMNS: Final = 32
"""Columns of the smallest block: in deterministic mode each block of columns has a part of a sum (`alloc_tile_workspace`)."""
_STATE_BLOCK: Final = 64
"""Elements of the smallest block of `_state_passing_bwd`."""

Tensors = tuple[torch.Tensor, ...]


class _Sizes(NamedTuple):
    """Sizes of a scan."""

    b: int
    s: int
    h: int
    p: int
    """Elements of a head."""
    g: int
    n: int
    """Elements of a state."""
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.s // self.chunk)

    @property
    def splits(self) -> int:
        """Parts into which the heads of a group are split, so that all multiprocessors have work."""
        heads = self.h // self.g
        units = torch.cuda.get_device_properties(0).multi_processor_count
        return -(-heads // max(min(-(-self.b * self.chunks * self.h // units), heads), 1))

    def of_chunks(self, *last: int) -> torch.Tensor:
        """[b, h, chunks, ...] in fp32."""
        return empty((self.b, self.h, self.chunks, *last), torch.float32)

    def states(self, dtype: torch.dtype) -> torch.Tensor:
        """[b, chunks, h, p, n]."""
        return empty((self.b, self.chunks, self.h, self.p, self.n), dtype)

    def scores(self, *parts: int) -> torch.Tensor:
        """[b, chunks, g, chunk, chunk] in fp32: the products of C and B."""
        return empty((self.b, self.chunks, *parts, self.g, self.chunk, self.chunk), torch.float32)

    def partial(self, columns: int) -> torch.Tensor:
        """Sums of each row of a chunk over `columns`; in deterministic mode the sum of each block of columns."""
        if not torch.are_deterministic_algorithms_enabled():
            return self.of_chunks(self.chunk)
        return torch.zeros((*self.of_chunks(self.chunk).shape, -(-columns // _SMALLEST_COLUMNS)), device="meta")


def _finished(partial: torch.Tensor) -> torch.Tensor:
    return partial.sum(dim=-1) if torch.are_deterministic_algorithms_enabled() else partial


def _launch(name: str, *tensors: torch.Tensor | None) -> None:
    calls.launched(name, [each for each in tensors if each is not None])


def _cumulative(sizes: _Sizes, dt: torch.Tensor) -> Tensors:
    """`_chunk_cumsum_fwd`: step sizes and their cumulative sums."""
    steps, sums = sizes.of_chunks(sizes.chunk), sizes.of_chunks(sizes.chunk)
    _launch("_chunk_cumsum_fwd_kernel", dt, steps, sums)
    return sums, steps


def _passed_states(sizes: _Sizes, x: torch.Tensor, B: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """`_chunk_state_fwd` and `_state_passing_fwd`: the states before each chunk, and the final ones."""
    states = sizes.states(torch.float32)
    _launch("_chunk_state_fwd_kernel", x, B, states)
    passed = sizes.states(dtype)
    final = empty((sizes.b, sizes.h, sizes.p * sizes.n), torch.float32)
    _launch("_state_passing_fwd_kernel", states, passed, final)
    return passed, final


def _scan_forward(sizes: _Sizes, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: Any) -> Tensors:
    """`_mamba_chunk_scan_combined_fwd`: output, output before the gate, step sizes, their cumulative sums."""
    sums, steps = _cumulative(sizes, dt)
    states, final = _passed_states(sizes, x, B, C.dtype)
    scores = sizes.scores()
    _launch("_bmm_chunk_fwd_kernel", C, B, scores)
    out = empty((sizes.b, sizes.s, sizes.h, sizes.p), x.dtype)
    ungated = like(out) if z is not None else out
    _launch("_chunk_scan_fwd_kernel", scores, x, z, out, ungated if z is not None else None, steps, sums, C, states)
    del final
    return out, ungated, steps, sums


def _gate_backward(sizes: _Sizes, z: torch.Tensor, dz: torch.Tensor, dout: torch.Tensor, out: torch.Tensor) -> Tensors:
    """`_chunk_scan_bwd_dz`: the gradient before the gate, and that of D."""
    parts = empty((-(-sizes.chunk // _SMALLEST_ROWS), sizes.b, sizes.chunks, sizes.h), torch.float32)
    ungated = torch.empty_like(dout)
    _launch("_chunk_scan_bwd_dz_kernel", dout, out, z, dz, ungated, parts)
    return ungated, parts.sum(dim=(0, 1, 2))


def _state_gradients(sizes: _Sizes, C: torch.Tensor, dout: torch.Tensor, states: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """`_chunk_scan_bwd_dstates` and `_state_passing_bwd`: gradients of states, of sums, and the states in 16 bit."""
    gradients = sizes.states(states.dtype)
    _launch("_chunk_scan_bwd_dstates_kernel", dout, C, gradients)
    passed = sizes.states(dtype)
    converted = sizes.states(dtype) if dtype is not states.dtype else states
    parts = sizes.of_chunks(-(-sizes.p * sizes.n // _STATE_BLOCK))
    _launch("_state_passing_bwd_kernel", gradients, states, passed, converted, parts)
    return passed, parts.sum(dim=-1), converted


def _sum_of_splits(sizes: _Sizes, name: str, *read: torch.Tensor) -> Tensors:
    """`_chunk_state_bwd_db` and `_chunk_scan_bwd_dC`: a gradient of B or C [b, s, g, n] in fp32, and sums of rows."""
    rows = sizes.partial(sizes.n)
    parts = empty((sizes.b, sizes.s, sizes.splits, sizes.g, sizes.n), torch.float32)
    _launch(name, *read, parts, rows)
    parts = parts.sum(2)
    return parts, _finished(rows)


def _scan_backward(
    sizes: _Sizes,
    inputs: Tensors,
    z: torch.Tensor | None,
    out: torch.Tensor,
    dout: torch.Tensor,
    given: Tensors | None,
) -> tuple[torch.Tensor | None, ...]:
    """`_mamba_chunk_scan_combined_bwd`: gradients of x, dt, A, B, C, D and the bias of dt.

    `given`: views that receive the gradients of x, dt, B, C and z; without them they are allocated.
    """
    x, dt, A, B, C, D, dt_bias = inputs
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dx_given = given[0] if given else None
    ddt, dB, dC = given[1:4] if given else (None, torch.empty_like(B), torch.empty_like(C))
    if ddt is None:
        ddt = torch.empty_like(dt)
    copied = dt.clone()
    sums, steps = _cumulative(sizes, copied)
    scores = sizes.scores()
    _launch("_bmm_chunk_fwd_kernel", C, B, scores)
    states, final = _passed_states(sizes, x, B, torch.float32)
    dD = None
    if z is not None:
        dout, dD = _gate_backward(sizes, z, given[4] if given else torch.empty_like(z), dout, out)
    dstates, from_states, states = _state_gradients(sizes, C, dout, states, x.dtype)
    parts = torch.zeros((-(-sizes.chunk // _SMALLEST_ROWS), sizes.b, sizes.chunks, sizes.h, 1), device="meta")
    dx = torch.empty_like(x) if dx_given is None else dx_given
    dsteps = sizes.partial(sizes.p)
    _launch("_chunk_scan_chunk_state_bwd_dx_kernel", x, scores, dout, B, dstates, dx, steps, sums, dsteps)
    of_x = parts.sum(dim=(0, 1, 2)).sum(dim=-1)
    del parts
    dD = of_x if dD is None else dD
    dsteps = _finished(dsteps)
    summed_B, following = _sum_of_splits(sizes, "_chunk_state_bwd_db_kernel", x, dstates, B)
    following = following.cumsum(dim=-1) if torch.are_deterministic_algorithms_enabled() else following
    summed_C, preceding = _sum_of_splits(sizes, "_chunk_scan_bwd_dc_kernel", dout, states, C)
    split_scores = sizes.scores(sizes.splits)
    _launch("_chunk_scan_bwd_dcb_kernel", x, dout, split_scores)
    dscores = split_scores.sum(2)
    del split_scores
    _launch("_bmm_chunk_bwd_kernel", C, dscores, summed_B, dB)
    _launch("_bmm_chunk_bwd_kernel", B, dscores, summed_C, dC)
    preceding[..., -1] += from_states
    previous = preceding.flip([-1]).cumsum(dim=-1).flip([-1])
    blocks = sizes.of_chunks(-(-sizes.chunk // _SMALLEST_ROWS), sizes.chunk)
    _launch("_chunk_scan_bwd_ddAcs_stable_kernel", x, dout, scores, blocks)
    stable = blocks.sum(dim=3)
    del blocks
    stable += following + previous
    dA, dbias = like(A), like(dt_bias)
    _launch("_chunk_cumsum_bwd_kernel", stable, dsteps, copied, ddt)
    del final
    return dx, ddt, dA, dB, dC, dD.to(D.dtype), dbias


class _SplitConvScan(torch.autograd.Function):
    """`MambaSplitConv1dScanCombinedFn`, without its own norm and output projection.

    Saved for backward: the projection, the weights and vectors, and the output of the scan before the gate.
    """

    @staticmethod
    def forward(ctx: Any, projected: torch.Tensor, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any, options: Any) -> Any:
        chunk, head_dim, groups = options
        batch, length, _ = projected.shape
        heads = D.shape[0]
        dim = heads * head_dim
        sizes = _Sizes(batch, length, heads, head_dim, groups, (weight.shape[0] - dim) // groups // 2, chunk)
        _, z, conv, dt = _parts_of(projected, sizes)
        convolved = _convolved(_strided(conv), weight, bias)
        x, B, C = _heads_of(convolved, sizes)
        out, ungated, steps, sums = _scan_forward(sizes, x, dt, B, C, z)
        ctx.save_for_backward(projected, weight, bias, ungated, A, D, dt_bias)
        ctx.sizes = sizes
        del steps, sums
        return out.reshape(batch, length, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, weight, bias, out, A, D, dt_bias = ctx.saved_tensors
        sizes = ctx.sizes
        _, z, conv, dt = _parts_of(projected, sizes)
        x, B, C = _heads_of(_convolved(_strided(conv), weight, bias), sizes)
        gradient = torch.empty_like(projected)
        _, dz, conv_gradient, ddt = _parts_of(gradient, sizes)
        dconv = torch.empty_like(conv)
        dx, dB, dC = _heads_of(dconv, sizes)
        dout = grads[0].unflatten(-1, (sizes.h, sizes.p))
        found = _scan_backward(sizes, (x, dt, A, B, C, D, dt_bias), z, out, dout, (dx, ddt, dB, dC, dz))
        del dout
        _, _, dA, _, _, dD, dbias = found
        dweight, dconv_bias = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(bias, dtype=torch.float32)
        _launch("causal_conv1d_bwd", conv, dconv, conv_gradient, weight, dweight)
        return gradient, dweight.type_as(weight), dconv_bias.type_as(bias), dbias, dA, dD, None


def _parts_of(projected: torch.Tensor, sizes: _Sizes) -> Tensors:
    """Views of the projection: an empty part, z, the input of the convolution, and dt."""
    dim = sizes.h * sizes.p
    _, z, conv, dt = torch.split(projected, [0, dim, dim + 2 * sizes.g * sizes.n, sizes.h], dim=-1)
    return projected, z.unflatten(-1, (sizes.h, sizes.p)), conv, dt


def _heads_of(convolved: torch.Tensor, sizes: _Sizes) -> Tensors:
    """Views of the output of the convolution: x, B and C."""
    states = sizes.g * sizes.n
    x, B, C = torch.split(convolved, [sizes.h * sizes.p, states, states], dim=-1)
    return x.unflatten(-1, (sizes.h, sizes.p)), B.unflatten(-1, (sizes.g, sizes.n)), C.unflatten(-1, (sizes.g, sizes.n))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """`ensure_stride`: the rows of the kernel's input begin at multiples of 8 elements."""
    return tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()


def _convolved(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`causal_conv1d_fwd_function` on [b, s, channels]."""
    out = torch.empty_like(tensor)
    _launch("causal_conv1d_fwd", tensor, weight, bias, out)
    return out


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Any = None,
    state_dtype: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Convolution, scan and gate: [b, s, 2·d + 2·g·n + heads] → [b, s, d]."""
    if seq_idx is not None or state_dtype is not None:
        raise AnalyzerError("--info-engine shadow: packed sequences of Mamba layers are not supported; use --info-engine formula")
    options = (chunk_size, headdim, ngroups)
    return _SplitConvScan.apply(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, options)  # type: ignore[no-any-return, no-untyped-call]


class _ChunkScan(torch.autograd.Function):
    """`MambaChunkScanCombinedFn`, without a gate. Saved: output, x, dt, cumulative sums, A, B, C, D, bias of dt."""

    @staticmethod
    def forward(ctx: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, chunk: int, D: Any, dt_bias: Any) -> Any:
        batch, length, heads, head_dim = x.shape
        sizes = _Sizes(batch, length, heads, head_dim, B.shape[2], B.shape[3], chunk)
        out, _, steps, sums = _scan_forward(sizes, x, dt, B, C, None)
        ctx.save_for_backward(out, x, dt, sums, A, B, C, D, dt_bias)
        ctx.sizes = sizes
        del steps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, x, dt, sums, A, B, C, D, dt_bias = ctx.saved_tensors
        found = _scan_backward(ctx.sizes, (x, dt, A, B, C, D, dt_bias), None, out, grads[0], None)
        dx, ddt, dA, dB, dC, dD, dbias = found
        del sums
        return dx, ddt, dA, dB, dC, None, dD, dbias


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    **_: Any,
) -> torch.Tensor:
    """The scan of `--disable-mamba-mem-eff-path`: [b, s, heads, p] → [b, s, heads, p]."""
    assert z is None, "megatron-core applies the gate in the norm"
    return _ChunkScan.apply(x, dt, A, B, C, chunk_size, D, dt_bias)  # type: ignore[no-any-return, no-untyped-call]


class _GatedNorm(torch.autograd.Function):
    """`LayerNormFn` as an RMS norm of groups, with a gate. Saved: input, weight, reciprocal deviations, and the gate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, z: Any, group: int) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gates = None if z is None else z.reshape(-1, z.shape[-1])
        out = torch.empty_like(rows)
        deviations = empty((rows.shape[1] // group * rows.shape[0],), torch.float32)
        _launch("_layer_norm_fwd_1pass_kernel", rows, gates, out, deviations, weight)
        ctx.save_for_backward(rows, weight, deviations, gates)
        ctx.shape, ctx.group = x.shape, group
        return out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, _, gates = ctx.saved_tensors
        gradient = grads[0].reshape(-1, rows.shape[1])
        dx = torch.empty_like(rows)
        dz = torch.empty_like(gates) if gates is not None else None
        width = min(65536 // rows.element_size(), 1 << (ctx.group - 1).bit_length())
        warps = min(max(width // 256, 1), 8)
        units = torch.cuda.get_device_properties(0).multi_processor_count * -(-4 // warps)
        parts = empty((-(-units // (rows.shape[1] // ctx.group)), rows.shape[1]), torch.float32)
        _launch("_layer_norm_bwd_kernel", rows, gates, gradient, dx, dz, parts)
        dweight = parts.sum(0).to(weight.dtype)
        return dx.reshape(ctx.shape), dweight, None if dz is None else dz.reshape(ctx.shape), None


class RMSNorm(torch.nn.Module):
    """`RMSNorm` of layernorm_gated.py: a norm of each group of elements."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.norm_before_gate = eps, norm_before_gate
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalized `x`, multiplied by the gate `z`."""
        return _GatedNorm.apply(x, self.weight, z, self.group_size)  # type: ignore[no-any-return, no-untyped-call]


def _inference_only(*_: Any, **__: Any) -> None:
    raise AnalyzerError("--info-engine shadow: inference with Mamba layers is not supported; use --info-engine formula")


def modules() -> dict[str, ModuleType]:
    """Return the replacement modules by import name."""
    contents: dict[str, dict[str, Callable[..., Any]]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": _inference_only},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": _inference_only},
    }
    found = {}
    for name, functions in contents.items():
        module = found[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(functions)
    return found
