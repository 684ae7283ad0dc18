"""One iteration of a rank, walked in the order of its schedule: the fullest instant, and what is alive then.

The chunks' timelines say what a microbatch keeps and needs, `schedule` which microbatches wait; `memory` adds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analyzer.memory.passes import ChunkTimeline, Point
from analyzer.memory.pipeline_tensors import Lingering, Stages
from analyzer.memory.workspaces import Workspace
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.schedule.pipeline import Step, equivalent_microbatches, steps
from analyzer.specs import TrainingJob


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
    before_capture: bool = False
    """In an iteration that runs before CUDA graphs are captured."""
    rest: str = "what modules and stages still name"
    """Name of what is there beyond states, runtime, activations and `transient`; in the first iteration less than nothing."""


def order_of(job: TrainingJob, stage: StageModel, microbatches: int) -> tuple[Step, ...]:
    """The steps of an iteration that matter for memory."""
    parallel = job.parallel
    legacy = job.megatron == "2023"
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
        combined=job.flags.overlap_moe_expert_parallel_comm,
    )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is alive on a rank beside the microbatches in flight."""

    beside: Lingering = field(default_factory=Lingering)
    idle: Sequence[tuple[Tensor, ...]] = ()
    """For each chunk, what it keeps while none of its microbatches is in flight, once it has run."""
    stages: Stages
    pairs: Mapping[tuple[int, int], Point] = field(default_factory=dict)
    """The fullest instants of a forward through one chunk side by side with a backward through another."""
    first_keeps: int = 0
    """Bytes that stay of the microbatch whose backward comes first, beyond what others keep."""


class _Neighbours:
    """What stages send and receive, beside each step of an iteration in turn."""

    def __init__(self, about: Surroundings, order: Sequence[Step], *, chunks: int, warm: bool) -> None:
        self._about = about
        self._warmed_up = _end_of_warmup(order)
        # where all forwards come first, messages are not waited for beside a step
        known = tuple(order) if self._warmed_up is not None else (None,) * len(order)
        self._around = tuple(zip((None, *known[:-1]), (*known[1:], None), strict=True))
        self._ended: tuple[int, int] | None = None
        """Microbatch and chunk of the backward that ran last."""
        self._over = False
        """Whether the backward of the microbatch at the end of the warm-up has run."""
        self._last = [0 if warm else -1] * chunks
        """The microbatch that each chunk ran last; -1 before the first."""

    def beside(self, place: int, step: Step, in_flight: Sequence[int]) -> tuple[Tensor, ...]:
        """What is alive beside the step at this place of the order."""
        about, ended = self._about, self._ended
        if step.kind == "forward":
            self._last[step.chunk] = step.microbatch
        previous, following = self._around[place]
        around = about.beside.beside(
            step, previous=previous, following=following, after_backward=ended is not None, stages=about.stages
        )
        kept = {
            (self._last[chunk], chunk): each
            for chunk, each in enumerate(about.idle)
            if self._last[chunk] >= 0 and not in_flight[chunk]
        }
        if self._over and self._warmed_up is not None and not about.stages.is_first(self._warmed_up[1]):
            kept.setdefault(self._warmed_up, about.beside.of_warmup)
        # the gradient of the input that was last in backward is the one that was sent
        named = (each for which, both in kept.items() for each in (both[:1] if which == ended and around else both))
        return (*around, *named)

    def end(self, step: Step) -> None:
        """A backward is over."""
        self._ended = (step.microbatch, step.chunk)
        self._over = self._over or self._ended == self._warmed_up


def _end_of_warmup(order: Sequence[Step]) -> tuple[int, int] | None:
    """Microbatch and chunk of the first forward after the warm-up, the last one before the first backward; None without any."""
    first = next((index for index, step in enumerate(order) if step.kind == "backward"), 0)
    if not any(step.kind == "forward" for step in order[first:]):
        return None
    return order[first - 1].microbatch, order[first - 1].chunk


def fullest_instant(
    order: Sequence[Step],
    timelines: Sequence[ChunkTimeline],
    *,
    about: Surroundings,
    items: Sequence[Workspace] = (),
    warm: bool = False,
) -> Peak:
    """Walks an iteration, in bytes above states.

    `warm`: workspaces and caches are all there from the start; else each appears with its first user.
    """
    neighbours = _Neighbours(about, order, chunks=len(timelines), warm=warm)
    runtime = sum(item.bytes for item in items if warm or not item.kinds)
    absent = [] if warm else [item for item in items if item.kinds]
    seen: set[tuple[str, int]] = set()
    waiting = 0
    in_flight = [0] * len(timelines)
    best = Peak(bytes=runtime, runtime=runtime, activations=0, transient=(), in_flight=tuple(in_flight), where="between iterations")
    left = [line.left if warm else 0 for line in timelines]
    for place, step in enumerate(order):
        line = timelines[step.chunk]
        running_too = 0  # kept by the microbatch whose backward runs side by side with this forward
        keeps = line.retained + (about.first_keeps if step.microbatch == 0 and step.chunk == len(timelines) - 1 else 0)
        if step.kind == "forward":
            in_flight[step.chunk] += 1
        else:
            waiting -= keeps
        points = line.forward if step.kind == "forward" else line.backward
        if step.kind == "forward" and line.first_forward and not warm and (step.kind, step.chunk) not in seen:
            points = line.first_forward
        elif (step.kind, step.chunk) in seen or not absent:
            points = (line.forward_peak if step.kind == "forward" else _backward_peak(line, again=bool(left[step.chunk])),)
        if step.paired:
            other = order[place + 1].chunk
            points = (about.pairs[step.chunk, other],)
            running_too = timelines[other].retained
            runtime, absent = runtime + sum(item.bytes for item in absent), []
        seen.add((step.kind, step.chunk))
        left[step.chunk] = 0
        left_beside = sum(
            each + (other.left_input if flying else 0)
            for each, other, flying in zip(left, timelines, in_flight, strict=True)
            if each
        )
        beside = neighbours.beside(place, step, in_flight)
        for point in points:
            runtime += _appear(absent, point)
            total = runtime + waiting - running_too + point.bytes + total_bytes(beside) + left_beside
            if total > best.bytes:
                best = Peak(
                    bytes=total,
                    runtime=runtime,
                    activations=waiting - running_too + point.saved,
                    transient=(*point.transient, *beside),
                    in_flight=tuple(in_flight),
                    where=_where(step, point, chunks=len(timelines)),
                )
        if step.kind == "forward":
            waiting += keeps
        else:
            in_flight[step.chunk] -= 1
            left[step.chunk] = line.left
            neighbours.end(step)
    return best


def _backward_peak(line: ChunkTimeline, *, again: bool) -> Point:
    """The fullest instant of a backward; `again` where the last thing that the chunk ran was a backward, too."""
    return line.next_backward_peak if again else line.backward_peak


def _appear(absent: list[Workspace], point: Point) -> int:
    """Bytes of the items that the module of this point is the first to need; takes them off the list."""
    if not absent:
        return 0
    found = [item for item in absent if item.phase == point.phase and point.kind in item.kinds]
    for item in found:
        absent.remove(item)
    return sum(item.bytes for item in found)


def _where(step: Step, point: Point, *, chunks: int) -> str:
    """The instant in words: 'backward of microbatch 3, decoder.layers.mlp.linear_fc2'."""
    path = point.path.partition(".")[2]
    chunk = f" of chunk {step.chunk}" if chunks > 1 else ""
    beside = " beside a backward" if step.paired else ""
    return f"{step.kind} of microbatch {step.microbatch}{chunk}{beside}, {path}"
