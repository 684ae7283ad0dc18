"""Convolution and scan of a Mamba mixer, between its input projection and its norm.

Source: `MambaMixer._ssm_training` and `_ssm_prefill` (core/ssm/mamba_mixer.py), `MambaContextParallel` (mamba_context_parallel.py,
0.16.1); `MambaSplitConv1dScanCombinedFn`, `MambaChunkScanCombinedFn`, `_mamba_chunk_scan_combined_fwd` and
`_mamba_chunk_scan_combined_bwd` (mamba_ssm/ops/triton/ssd_combined.py, 2.3.2).
"""

from __future__ import annotations

from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.mamba.sizes import MixerSizes
from analyzer.modules.tree import Collective, Module, Parameter, Phase, Tensor, largest
from analyzer.specs.hybrid import CONVOLUTION_WIDTH, SCAN_CHUNK
from analyzer.units import ceil_div

SMALLEST_ROWS: Final = 32
"""Rows of the smallest block of a kernel, which has partial sums of its own."""
_SMALLEST_COLUMNS: Final = 32
"""Columns of the smallest block. Deterministic kernels write a sum of each row for each of them (`alloc_tile_workspace`)."""
_STATE_BLOCK: Final = 64
"""Elements of a state in the smallest block of `_state_passing_bwd`."""
_PROJECTED: Final = "(2·d+2·g·n+a)/(t·c)"
_CHANNELS: Final = "(d+2·g·n)/(t·c)"


def scan(sizes: MixerSizes) -> Module:
    """[s, b, (2·d+2·g·n+a)/t] → [s, b, d/t]. Its parameters are those of the convolution.

    By default one function saves the projection and the output of the scan, and computes the convolution and the states again in
    backward. With `--disable-mamba-mem-eff-path` each operation saves its inputs.
    """
    full = sizes.hybrid.width + 2 * sizes.hybrid.state_width
    weights = tuple(
        Parameter(
            name=name,
            shape=(sizes.channels, *shape),
            dtype=sizes.shapes.dtype,
            sharding="tensor",
            full_shape=(full, *shape),
        )
        for name, shape in (("weight", (1, CONVOLUTION_WIDTH)), ("bias", ()))
    )
    in_one = sizes.hybrid.memory_efficient
    return Module(
        name="conv1d",
        kind=ModuleKind.MIXER_SCAN,
        function=True,
        parameters=weights,
        saved=(*(_saved(sizes) if in_one else _saved_separately(sizes)), *_vectors(sizes)),
        forward_workspace=_forward(sizes) if in_one else _forward_separately(sizes),
        backward_workspace=_backward(sizes) if in_one else _backward_separately(sizes),
        collectives=(*_exchanges(sizes, "forward"), *_exchanges(sizes, "backward")),
        source="mamba_split_conv1d_scan_combined" if in_one else "causal_conv1d_fn, mamba_chunk_scan_combined",
    )


def _exchanges(sizes: MixerSizes, phase: Phase) -> tuple[Collective, ...]:
    """Context-parallel ranks exchange tokens for heads: z, x, B, C and dt before the convolution, and the output after the scan.

    A norm that applies the gate needs z again in the layout of the output.
    """
    if sizes.c == 1:
        return ()
    shapes = sizes.shapes
    widths = ((sizes.width, 3 if sizes.hybrid.memory_efficient else 4), (sizes.repeated_states, 2), (sizes.heads, 1))
    return tuple(
        Collective(kind="all_to_all", group="cp", shape=(shapes.s, shapes.b, width), dtype=shapes.dtype, phase=phase, count=count)
        for width, count in widths
    )


def _transposed(sizes: MixerSizes) -> bool:
    """Whether [s, b, …] becomes [b, s, …] in a new tensor, and the output of the scan [s, b, …] again."""
    return sizes.b > 1


def _vectors(sizes: MixerSizes) -> tuple[Tensor, ...]:
    """Small saved tensors. A context-parallel rank copies its part of the weights of the convolution."""
    vectors = (sizes.vector("decays"), sizes.vector("negative decays"), sizes.vector("bias of dt"))
    if sizes.c == 1:
        return vectors
    channels, dtype = sizes.channels_of_rank, sizes.shapes.dtype
    return (
        *vectors,
        Tensor(name="weights of the convolution", shape=(channels, CONVOLUTION_WIDTH), dtype=dtype, formula=f"8·{_CHANNELS}"),
        Tensor(name="biases of the convolution", shape=(channels,), dtype=dtype, formula=f"2·{_CHANNELS}"),
    )


def _saved(sizes: MixerSizes) -> tuple[Tensor, ...]:
    made_in = "" if _transposed(sizes) or sizes.c > 1 else "mixer.in_proj"
    return (
        sizes.tokens("projection", sizes.projected_of_rank, _PROJECTED, made_in=made_in),
        sizes.tokens("output before the gate", sizes.width_of_rank, "d/(t·c)"),
    )


def _saved_separately(sizes: MixerSizes) -> tuple[Tensor, ...]:
    return (
        sizes.tokens("input of the convolution", sizes.channels_of_rank, _CHANNELS),
        sizes.tokens("x", sizes.width_of_rank, "d/(t·c)"),
        sizes.tokens("dt", sizes.heads_of_rank, "a/(t·c)"),
        sizes.tokens("B", sizes.states_of_rank, "g·n/(t·c)"),
        sizes.tokens("C", sizes.states_of_rank, "g·n/(t·c)"),
        # without a copy it is the input of the norm, which saves it
        *((_scanned(sizes),) if _copies_output(sizes) else ()),
        sizes.rows("sums of steps"),
    )


def _copies_output(sizes: MixerSizes) -> bool:
    return _transposed(sizes) or sizes.c > 1


def _scanned(sizes: MixerSizes) -> Tensor:
    return sizes.tokens("output of the scan", sizes.width_of_rank, "d/(t·c)")


def _convolved(sizes: MixerSizes) -> Tensor:
    return sizes.tokens("output of the convolution", sizes.channels_of_rank, _CHANNELS)


def _final_states(sizes: MixerSizes) -> Tensor:
    shape = (sizes.b, sizes.heads_of_rank, sizes.hybrid.head_dim * sizes.hybrid.state_dim)
    return Tensor(name="final states", shape=shape, dtype="fp32", formula="4·b·d·n/(t·c)")


def _referenced(sizes: MixerSizes) -> tuple[Tensor, ...]:
    """The projection before it is transposed, which `MambaMixer.forward` references."""
    return (sizes.tokens("output of the projection", sizes.projected_of_rank, _PROJECTED),) if _transposed(sizes) else ()


def _exchanged(sizes: MixerSizes) -> tuple[Tensor, ...]:
    """With context parallelism, before the scan: the projection before and after the exchange, and before it is in order.

    What the scan saves is not allocated then; its output is subtracted.
    """
    if sizes.c == 1:
        return ()
    return (
        sizes.tokens("projection before the exchange", sizes.projected_of_rank, _PROJECTED),
        sizes.tokens("exchanged parts, without the output", sizes.projected_of_rank - sizes.width_of_rank, "(d+2·g·n+a)/(t·c)"),
        sizes.tokens("projection out of order", sizes.projected_of_rank, _PROJECTED),
    )


def _of_states(sizes: MixerSizes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """In forward: the states that are passed on, together with those of each chunk, or with the products of C and B."""
    always = (sizes.all_states("passed states", dtype=sizes.shapes.dtype), _final_states(sizes))
    return (*always, sizes.all_states("states", dtype="fp32")), (*always, sizes.scores("scores"))


def _forward(sizes: MixerSizes) -> tuple[Tensor, ...]:
    """At the largest of three instants: the exchange, passing states on, and writing the outputs."""
    always = (_convolved(sizes), sizes.rows("steps"), sizes.rows("sums of steps"), *_referenced(sizes))
    passing, multiplying = _of_states(sizes)
    output = sizes.tokens("gated output", sizes.width_of_rank, "d/(t·c)")
    return largest(_exchanged(sizes), (*always, *passing), (*always, *multiplying, output))


def _forward_separately(sizes: MixerSizes) -> tuple[Tensor, ...]:
    """`_ssm_prefill` references the transposed projection, the output of the convolution, and the gate."""
    gates = (sizes.tokens("gate", sizes.width_of_rank, "d/(t·c)"),) if _copies_output(sizes) else ()
    projection = sizes.tokens("projection", sizes.projected_of_rank, _PROJECTED)
    always = (projection, _convolved(sizes), *gates, sizes.rows("steps"), *_referenced(sizes))
    passing, multiplying = _of_states(sizes)
    return largest(_exchanged(sizes), (*always, *passing), (*always, *multiplying))


def _backward(sizes: MixerSizes) -> tuple[Tensor, ...]:
    always = (
        sizes.tokens("output gradient", sizes.width_of_rank, "d/(t·c)"),
        _convolved(sizes),
        sizes.tokens("gradient of the projection", sizes.projected_of_rank, _PROJECTED),
        sizes.tokens("gradient of the output of the convolution", sizes.channels_of_rank, _CHANNELS),
    )
    ungated = sizes.tokens("gradient before the gate", sizes.width_of_rank, "d/(t·c)")
    return (*always, *_scan_backward(sizes, ungated=(ungated,), dx=()))


def _backward_separately(sizes: MixerSizes) -> tuple[Tensor, ...]:
    always = (
        sizes.tokens("output gradient", sizes.width_of_rank, "d/(t·c)"),
        sizes.tokens("gradient of the gate", sizes.width_of_rank, "d/(t·c)"),
        sizes.tokens("gradient of dt", sizes.heads_of_rank, "a/(t·c)"),
        sizes.tokens("gradient of B in 16 bit", sizes.states_of_rank, "g·n/(t·c)"),
        sizes.tokens("gradient of C in 16 bit", sizes.states_of_rank, "g·n/(t·c)"),
        # the norm has freed it
        *(() if _copies_output(sizes) else (_scanned(sizes),)),
    )
    return (*always, *_scan_backward(sizes, ungated=(), dx=(sizes.tokens("gradient of x", sizes.width_of_rank, "d/(t·c)"),)))


def _scan_backward(sizes: MixerSizes, *, ungated: tuple[Tensor, ...], dx: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`_mamba_chunk_scan_combined_bwd` at the largest of the instants between its kernels.

    `ungated`, `dx`: gradients that it allocates, of the output before the gate and of x.
    """
    dtype = sizes.shapes.dtype
    always = (
        sizes.tokens("copy of dt", sizes.heads_of_rank, "a/(t·c)"),
        sizes.rows("steps"),
        sizes.rows("sums of steps, again"),
        sizes.scores("scores"),
        _final_states(sizes),
    )
    passed = sizes.all_states("passed states", dtype="fp32")
    halves = (sizes.all_states("gradients of states", dtype=dtype), sizes.all_states("states in 16 bit", dtype=dtype))
    blocks = ceil_div(sizes.hybrid.head_dim * sizes.hybrid.state_dim, _STATE_BLOCK)
    passing = (
        *ungated,
        passed,
        sizes.all_states("gradients of states in fp32", dtype="fp32"),
        *halves,
        sizes.rows("parts of the gradient of sums", blocks, symbol="/q·p·n/64"),
    )
    after = (*ungated, *halves, *dx, sizes.rows("gradients of steps"))
    summed = sizes.tokens("gradient of B", sizes.states_of_rank, "g·n/(t·c)", dtype="fp32")
    parts = sizes.tokens("parts of the gradient of C", sizes.states_of_rank * sizes.splits, "parts·g·n/(t·c)", dtype="fp32")
    row_sums = sizes.rows("sums of rows")
    of_states = _row_sums(sizes, sizes.hybrid.state_dim)
    more = (*after, summed, summed, row_sums, row_sums)
    dscores = sizes.scores("gradient of scores")
    return (
        *always,
        *largest(
            (passed, sizes.all_states("states", dtype="fp32")),
            passing,
            (*after, _row_sums(sizes, sizes.hybrid.head_dim)),
            (*after, summed, row_sums, of_states, parts, summed),
            (*more, of_states),
            (*more, sizes.scores("parts of the gradient of scores", sizes.splits), dscores),
            (
                *more,
                dscores,
                row_sums,
                sizes.rows("parts of the gradient of rows", SCAN_CHUNK // SMALLEST_ROWS, SCAN_CHUNK, symbol="·4"),
                row_sums,
            ),
        ),
    )


def _row_sums(sizes: MixerSizes, columns: int) -> Tensor:
    """Sums of each row of a chunk over `columns`, as a kernel writes them."""
    if not sizes.shapes.inputs.deterministic:
        return sizes.rows("sums of rows")
    blocks = ceil_div(columns, _SMALLEST_COLUMNS)
    return sizes.rows("sums of rows in blocks of columns", SCAN_CHUNK, blocks, symbol=f"·{blocks}")
