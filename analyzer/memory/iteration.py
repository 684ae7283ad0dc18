"""One iteration of a rank in the order of its schedule: its peak, and what is allocated then.

`chunk_memory` says what a microbatch saves and needs, the schedule which microbatches are in flight; `ranks` adds the states. The
walk is done in integers. What is allocated at the peak is put together once, at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analyzer.layout.stages import Chunk
from analyzer.memory.chunk_memory import ChunkMemory, Point
from analyzer.memory.peak import Peak, PeakPosition
from analyzer.memory.pipeline_tensors import PipelineTensors, PipelineWalk
from analyzer.memory.workspaces import Workspace
from analyzer.modules.tree import Tensor
from analyzer.results import PeakEvent
from analyzer.schedule.pipeline import Step, equivalent_microbatches, steps
from analyzer.specs import TrainingJob


def order_of(job: TrainingJob, pipeline_rank: int, microbatches: int) -> tuple[Step, ...]:
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
        pipeline_rank=pipeline_rank,
        chunks=parallel.chunks,
        microbatches=equivalent,
        group_size=parallel.microbatch_group_size,
        legacy=legacy,
        combined=job.flags.overlap_moe_expert_parallel_comm,
    )


@dataclass(frozen=True, kw_only=True)
class PeakContext:
    """What is allocated on a rank beside the microbatches in flight."""

    chunks: Sequence[Chunk]
    pipeline: PipelineTensors = field(default_factory=PipelineTensors)
    idle: Sequence[tuple[Tensor, ...]] = ()
    """For each chunk, what it keeps while none of its microbatches is in flight, once it has run."""
    overlapped: Mapping[tuple[int, int], Point] = field(default_factory=dict)
    """The peak of a forward through one chunk that overlaps with a backward through another."""
    first_keeps: int = 0
    """Bytes that stay of the microbatch whose backward comes first, beyond what others keep."""


def peak_of_iteration(
    order: Sequence[Step],
    chunks: Sequence[ChunkMemory],
    *,
    context: PeakContext,
    workspaces: Sequence[Workspace] = (),
    warm: bool = False,
) -> Peak:
    """The peak of an iteration, in bytes above states.

    `warm`: workspaces and caches exist from the start; otherwise each is allocated by its first user.
    """
    walk = _Walk(order, chunks, context, workspaces, warm=warm)
    for place, step in enumerate(order):
        walk.take(place, step)
    return walk.peak(order, context, warm=warm)


class _Walk:
    """The state of a walk over the steps of an iteration, in bytes."""

    def __init__(
        self,
        order: Sequence[Step],
        chunks: Sequence[ChunkMemory],
        context: PeakContext,
        workspaces: Sequence[Workspace],
        *,
        warm: bool,
    ) -> None:
        self._order = order
        self._chunks = chunks
        self._context = context
        self._warm = warm
        self._pipeline = PipelineWalk(context.pipeline, context.idle, context.chunks, order, warm=warm)
        self._workspaces = sum(each.bytes for each in workspaces if warm or not each.kinds)
        self._absent = [] if warm else [each for each in workspaces if each.kinds]
        """Workspaces that their first user is yet to allocate."""
        self._seen: set[tuple[str, int]] = set()
        self._waiting = 0
        """Bytes saved by microbatches in flight."""
        self._in_flight = [0] * len(chunks)
        self._left = [each.left if warm else 0 for each in chunks]
        """Bytes that checkpoints of each chunk left behind in its last backward."""
        self._highest = self._workspaces
        self._peak: tuple[int, Point] | None = None
        """The place of the highest step so far, and the instant in it."""
        self._at_peak = (self._workspaces, 0, tuple(self._in_flight))
        """Workspaces, activations and microbatches in flight at that instant."""

    def take(self, place: int, step: Step) -> None:
        """One step of the schedule."""
        chunk = self._chunks[step.chunk]
        context = self._context
        forward = step.kind == "forward"
        keeps = chunk.retained
        if context.first_keeps and step.microbatch == 0 and step.chunk == len(self._chunks) - 1:
            keeps += context.first_keeps
        if forward:
            self._in_flight[step.chunk] += 1
        else:
            self._waiting -= keeps
        beside_step = 0  # saved by the microbatch whose backward overlaps with this forward
        if step.paired:
            other = self._order[place + 1].chunk
            beside_step = self._chunks[other].retained
            self._workspaces += sum(each.bytes for each in self._absent)
            self._absent = []
            points: tuple[Point, ...] = (context.overlapped[step.chunk, other],)
        else:
            points = self._points(step, chunk)
        self._seen.add((step.kind, step.chunk))
        self._left[step.chunk] = 0
        base = self._waiting - beside_step + self._pipeline.bytes_during(place, step, self._in_flight) + self._left_beside()
        for point in points:
            if self._absent:
                self._appear(point)
            total = self._workspaces + base + point.bytes
            if total > self._highest:
                self._highest = total
                self._peak = (place, point)
                self._at_peak = (self._workspaces, self._waiting - beside_step + point.saved, tuple(self._in_flight))
        if forward:
            self._waiting += keeps
        else:
            self._in_flight[step.chunk] -= 1
            self._left[step.chunk] = chunk.left
            self._pipeline.end(step)

    def _points(self, step: Step, chunk: ChunkMemory) -> tuple[Point, ...]:
        """The instants of a step that may be the peak: all of them while workspaces are still to be allocated."""
        new = (step.kind, step.chunk) not in self._seen
        if step.kind == "forward":
            if new and not self._warm and chunk.first_forward is not None:
                return tuple(chunk.first_forward.points("forward"))
            if new and any(each.phase == "forward" for each in self._absent):
                return tuple(chunk.points("forward"))
            return (chunk.forward_peak,)
        if new and any(each.phase == "backward" for each in self._absent):
            return tuple(chunk.points("backward"))
        return (chunk.next_backward_peak if self._left[step.chunk] else chunk.backward_peak,)

    def _left_beside(self) -> int:
        """Bytes that checkpoints of other chunks left behind."""
        if not any(self._left):
            return 0
        return sum(
            left + (chunk.left_input if flying else 0)
            for left, chunk, flying in zip(self._left, self._chunks, self._in_flight, strict=True)
            if left
        )

    def _appear(self, point: Point) -> None:
        """Counts the workspaces that this instant is the first to need."""
        phase = "backward" if point.backward else "forward"
        found = [each for each in self._absent if each.phase == phase and point.kind in each.kinds]
        for each in found:
            self._absent.remove(each)
            self._workspaces += each.bytes

    def peak(self, order: Sequence[Step], context: PeakContext, *, warm: bool) -> Peak:
        """The highest instant, with its tensors."""
        workspaces, activations, in_flight = self._at_peak
        if self._peak is None:
            position = PeakPosition(event=PeakEvent.BETWEEN_ITERATIONS)
            return Peak(
                bytes=self._highest, workspaces=workspaces, activations=0, transient=(), in_flight=in_flight, position=position
            )
        place, point = self._peak
        step = order[place]
        return Peak(
            bytes=self._highest,
            workspaces=workspaces,
            activations=activations,
            transient=(*point.transient, *_pipeline_tensors_at(place, order, context, len(self._chunks), warm=warm)),
            in_flight=in_flight,
            position=PeakPosition(
                event=PeakEvent.FORWARD if step.kind == "forward" else PeakEvent.BACKWARD,
                step=step,
                path=point.path,
                chunks=len(self._chunks),
            ),
        )


def _pipeline_tensors_at(place: int, order: Sequence[Step], context: PeakContext, chunks: int, *, warm: bool) -> tuple[Tensor, ...]:
    """The tensors of the pipeline schedule beside the step at this place."""
    walk = PipelineWalk(context.pipeline, context.idle, context.chunks, order, warm=warm)
    in_flight = [0] * chunks
    for index, step in enumerate(order[: place + 1]):
        if step.kind == "forward":
            in_flight[step.chunk] += 1
        walk.bytes_during(index, step, in_flight)
        if index == place:
            break
        if step.kind == "backward":
            in_flight[step.chunk] -= 1
            walk.end(step)
    return walk.tensors_during(place, order[place], in_flight)
