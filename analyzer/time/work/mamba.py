"""Convolution, scan and gated norm of a Mamba mixer: kernels whose time is taken to be that of their bytes.

Bytes are those of the tensors that each kernel of mamba-ssm 2.3.2 and causal-conv1d 1.6 reads and writes, and of the copies that
megatron-core 0.16.1 makes around them (`MambaMixer._ssm_training` and `_ssm_prefill`, core/ssm/mamba_context_parallel.py). The
products of small matrices inside the scan are not counted as matrix products of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from analyzer.modules.kinds import Kernels
from analyzer.modules.mamba.scan import SMALLEST_ROWS
from analyzer.modules.mamba.sizes import MixerSizes
from analyzer.modules.tree import Module, Tensor
from analyzer.specs.hybrid import SCAN_CHUNK
from analyzer.time.work.context import WorkContext
from analyzer.time.work.elementwise import norm
from analyzer.time.work.kernels import MemoryBound, MemoryKind, Work
from analyzer.units import dtype_bytes

_CONVOLUTION: Final = "convolved convolved"
_CONVOLUTION_GRADIENT: Final = "convolved convolved convolved"
_COMMON: Final = "dt rows rows; x B states; B B scores"
"""Kernels that the memory-efficient backward repeats after the convolution: sums of steps, states of chunks, products of C and B.

Each item lists the tensors of a kernel by the names of `_tensors`.
"""
_FORWARD: Final = f"{_COMMON}; states half-states; scores x x x x rows rows B half-states"
_BACKWARD: Final = (
    f"{_COMMON}; states states; x x x x x; x B states; states states half-states half-states; "
    "x scores x B half-states x rows rows rows; x half-states B parts-of-B rows; parts-of-B summed-B; "
    "x half-states B parts-of-B rows; parts-of-B summed-B; x x parts-of-scores; parts-of-scores scores; "
    "B scores summed-B B; B scores summed-B B; rows rows rows rows rows rows rows rows; x x scores blocks-of-rows; "
    "blocks-of-rows rows; rows rows dt dt"
)


def scan(context: WorkContext) -> Work:
    """The convolution, the kernels of the scan in forward and backward, and the copies and the exchange of heads around them."""
    sizes = MixerSizes(context.shapes)
    exchanged = _exchanged(sizes, context)
    copied, copied_back = _copies(sizes, context)
    convolution = _kernels(sizes, "convolution", _CONVOLUTION, "convolution")
    return Work(
        (*exchanged, *copied, convolution, _kernels(sizes, "scan", _FORWARD, "scan")),
        (
            convolution,
            _kernels(sizes, "scan gradient", _BACKWARD, "scan"),
            _kernels(sizes, "convolution gradient", _CONVOLUTION_GRADIENT, "convolution"),
            *copied_back,
            *exchanged,
        ),
    )


def gated_norm(context: WorkContext) -> Work:
    """The norm of each group of the output."""
    sizes = MixerSizes(context.shapes)
    return norm(context.shapes.s * context.shapes.b * sizes.width, recomputed=False)


def _tensors(sizes: MixerSizes) -> dict[str, Tensor]:
    """The tensors that kernels read and write, by a short name."""
    dtype = sizes.shapes.dtype
    return {
        "x": sizes.tokens("", sizes.width_of_rank, ""),
        "B": sizes.tokens("", sizes.states_of_rank, ""),
        "summed-B": sizes.tokens("", sizes.states_of_rank, "", dtype="fp32"),
        "parts-of-B": sizes.tokens("", sizes.states_of_rank * sizes.splits, "", dtype="fp32"),
        "convolved": sizes.tokens("", sizes.channels_of_rank, ""),
        "dt": sizes.tokens("", sizes.heads_of_rank, ""),
        "rows": sizes.rows(""),
        "states": sizes.all_states("", dtype="fp32"),
        "half-states": sizes.all_states("", dtype=dtype),
        "scores": sizes.scores(""),
        "parts-of-scores": sizes.scores("", sizes.splits),
        "blocks-of-rows": sizes.rows("", SCAN_CHUNK // SMALLEST_ROWS, SCAN_CHUNK),
    }


def _kernels(sizes: MixerSizes, name: str, listed: str, kind: MemoryKind) -> MemoryBound:
    moved = {each: dtype_bytes(tensor.dtype, prod(tensor.shape)) for each, tensor in _tensors(sizes).items()}
    kernels = listed.split(";")
    return MemoryBound(name, float(sum(moved[each] for kernel in kernels for each in kernel.split())), kind, len(kernels))


def _copies(sizes: MixerSizes, context: WorkContext) -> tuple[tuple[MemoryBound, ...], tuple[MemoryBound, ...]]:
    """Copies in forward and backward: several samples are transposed, and separate kernels read contiguous tensors."""
    both = 2.0 * context.element_bytes * sizes.s * sizes.b
    projected, width = sizes.projected_of_rank, sizes.width_of_rank
    forward, backward = (projected + width, projected) if sizes.b > 1 else (0, 0)
    if not sizes.hybrid.memory_efficient:
        forward += 2 * sizes.channels_of_rank + projected + (width if sizes.b > 1 else 0)
        backward += 2 * sizes.channels_of_rank + projected
    if not forward:
        return (), ()
    return (MemoryBound("copies around the scan", both * forward, launches=2),), (
        MemoryBound("copies of gradients around the scan", both * backward, launches=1),
    )


def _exchanged(sizes: MixerSizes, context: WorkContext) -> tuple[MemoryBound, ...]:
    """Context parallelism: parts of heads are concatenated before and after each exchange, and tokens are brought into order."""
    if sizes.c == 1:
        return ()
    both = 2.0 * context.element_bytes * sizes.s * sizes.b
    return (MemoryBound("exchange of heads", both * (3 * sizes.projected_of_rank + 2 * sizes.width_of_rank), launches=9),)


FORMULAS: Final[dict[Kernels, Callable[[Module, WorkContext], Work]]] = {
    Kernels.MIXER_SCAN: lambda _, context: scan(context),
    Kernels.MIXER_NORM: lambda _, context: gated_norm(context),
}
