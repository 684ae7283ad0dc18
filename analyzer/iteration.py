"""One iteration of a rank, walked in the order of its schedule: the fullest instant, and what is alive then.

The chunks' timelines say what a microbatch keeps and needs, `schedule` which microbatches wait; `memory` adds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from analyzer.exchange import Lingering
from analyzer.modules.tree import Tensor
from analyzer.results import StageModel
from analyzer.runtime import RuntimeItem
from analyzer.schedule import Step, equivalent_microbatches, steps
from analyzer.specs import Launch
from analyzer.timeline import ChunkTimeline, Point, size


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest instant of an iteration on one rank."""

    bytes: int
    runtime: int
    """Of workspaces and caches that were there by then."""
    activations: int
    """Kept for backward, of all microbatches in flight."""
    transient: tuple[Tensor, ...]
    in_flight: tuple[int, ...]
    """Microbatches of each chunk whose backward has not ended, the running one counted in."""
    where: str
    rest: str = "other"
    """Name of what is there beyond states, runtime, activations and `transient`; in the first iteration less than nothing."""


def order_of(launch: Launch, stage: StageModel, microbatches: int) -> tuple[Step, ...]:
    """The steps of an iteration that matter for memory."""
    parallel = launch.parallel
    legacy = launch.megatron == "2023"
    equivalent = equivalent_microbatches(
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        microbatches=microbatches,
        group_size=parallel.microbatch_group_size,
        legacy=legacy,
    )
    return steps(
        pipeline=parallel.pipeline,
        pipeline_rank=stage.pipeline_rank,
        chunks=parallel.chunks,
        microbatches=equivalent,
        group_size=parallel.microbatch_group_size,
        legacy=legacy,
        combined=launch.runtime.overlap_moe_expert_parallel_comm,
    )


def fullest_instant(
    order: Sequence[Step],
    timelines: Sequence[ChunkTimeline],
    *,
    base: int,
    items: Sequence[RuntimeItem],
    beside: Lingering,
    warm: bool = False,
    pairs: Mapping[tuple[int, int], Point] = MappingProxyType({}),
    first_keeps: int = 0,
) -> Peak:
    """Walks an iteration. `warm`: workspaces and caches are all there from the start; else each appears with its first user.

    `pairs` are the fullest instants of a forward through one chunk side by side with a backward through another;
    `first_keeps` bytes stay of the microbatch whose backward comes first, beyond what others keep.
    """
    around: tuple[Tensor, ...] = ()
    after_backward = False
    runtime = sum(item.bytes for item in items) if warm else 0
    absent = [] if warm else list(items)
    seen: set[tuple[str, int]] = set()
    waiting = 0
    in_flight = [0] * len(timelines)
    best = Peak(
        bytes=base + runtime, runtime=runtime, activations=0, transient=(), in_flight=tuple(in_flight), where="between iterations"
    )
    for step, following in zip(order, (*order[1:], None), strict=True):
        line = timelines[step.chunk]
        running_too = 0  # kept by the microbatch whose backward runs side by side with this forward
        keeps = line.retained + (first_keeps if step.microbatch == 0 and step.chunk == len(timelines) - 1 else 0)
        if step.kind == "forward":
            in_flight[step.chunk] += 1
        else:
            waiting -= keeps
        points = line.forward if step.kind == "forward" else line.backward
        if step.kind == "forward" and line.first_forward and not warm and (step.kind, step.chunk) not in seen:
            points = line.first_forward
        elif (step.kind, step.chunk) in seen or not absent:
            points = (line.forward_peak if step.kind == "forward" else line.backward_peak,)
        if step.paired and following is not None:
            points = (pairs[step.chunk, following.chunk],)
            running_too = timelines[following.chunk].retained
            runtime, absent = runtime + sum(item.bytes for item in absent), []
        seen.add((step.kind, step.chunk))
        if after_backward:
            around = beside.forward if step.kind == "forward" else beside.backward
        for point in points:
            runtime += _appear(absent, point)
            total = base + runtime + waiting - running_too + point.bytes + size(around)
            if total > best.bytes:
                best = Peak(
                    bytes=total,
                    runtime=runtime,
                    activations=waiting - running_too + point.saved,
                    transient=(*point.transient, *around),
                    in_flight=tuple(in_flight),
                    where=_where(step, point, chunks=len(timelines)),
                )
        if step.kind == "forward":
            waiting += keeps
        else:
            in_flight[step.chunk] -= 1
            after_backward = True
    return best


def _appear(absent: list[RuntimeItem], point: Point) -> int:
    """Bytes of the items that the module of this point is the first to need; takes them off the list."""
    if not absent:
        return 0
    name = point.path.rpartition(".")[2]
    found = [item for item in absent if item.phase == point.phase and name in item.modules]
    for item in found:
        absent.remove(item)
    return sum(item.bytes for item in found)


def _where(step: Step, point: Point, *, chunks: int) -> str:
    """The instant in words: 'backward of microbatch 3, decoder.layers.mlp.linear_fc2'."""
    path = point.path.partition(".")[2]
    chunk = f" of chunk {step.chunk}" if chunks > 1 else ""
    beside = " beside a backward" if step.paired else ""
    return f"{step.kind} of microbatch {step.microbatch}{chunk}{beside}, {path}"
