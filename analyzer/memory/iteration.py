"""One iteration of a rank in the order of its schedule: its peak, and what is allocated then.

`chunk_memory` says what a microbatch saves and needs, the schedule which microbatches are in flight; `ranks` adds the states. The
walk is done in integers. What is allocated at the peak is put together once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from analyzer.memory.chunk_memory import ChunkMemory, Point
from analyzer.memory.peak import Peak, PeakPosition
from analyzer.memory.pipeline_tensors import MessageOrder, PipelineTensors, PipelineWalk
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
        pipeline_rank=pipeline_rank,
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

    pipeline: PipelineTensors = field(default_factory=PipelineTensors)
    idle: Sequence[tuple[Tensor, ...]] = ()
    """For each chunk, what it keeps while none of its microbatches is in flight, once it has run."""
    overlapped: Mapping[tuple[int, int], Point] = field(default_factory=dict)
    """The peak of a forward through one chunk that overlaps with a backward through another."""
    first_keeps: int = 0
    """Bytes that stay of the microbatch whose backward comes first, beyond what others keep."""


def peak_of_iteration(
    messages: MessageOrder,
    chunks: Sequence[ChunkMemory],
    *,
    context: PeakContext,
    workspaces: Sequence[Workspace] = (),
    warm: bool = False,
) -> Peak:
    """The peak of an iteration, in bytes above states.

    `messages` has the steps of the iteration. `warm`: workspaces and caches exist from the start; otherwise each is allocated by
    its first user.
    """
    walk = _Walk(messages, chunks, context, workspaces, warm=warm)
    take = walk.take
    order = messages.order
    skipped, end = _lower_steps(order, chunks)
    for place in range(end):
        if place in skipped:
            walk.skip_forward()
        else:
            take(place, order[place])
    return walk.peak(messages, context, warm=warm)


def _lower_steps(order: Sequence[Step], chunks: Sequence[ChunkMemory]) -> tuple[range, int]:
    """The forwards of a warm-up with a higher one after them, and the end of the steps that can have the peak.

    With one chunk every forward of the warm-up has one more microbatch in flight, and every backward of the cool-down one less.
    The first steps of each kind are not skipped: they may allocate workspaces, or run while checkpoints have left nothing behind.
    """
    if len(chunks) > 1 or any(step.paired for step in order[:2]):
        return range(0), len(order)
    warmup = next((place for place, step in enumerate(order) if step.kind == "backward"), 0)
    last = len(order)
    while last and order[last - 1].kind == "backward":
        last -= 1
    return range(2, warmup - 1), min(len(order), last + 3)


class _Walk:
    """The state of a walk over the steps of an iteration, in bytes."""

    def __init__(
        self,
        messages: MessageOrder,
        chunks: Sequence[ChunkMemory],
        context: PeakContext,
        workspaces: Sequence[Workspace],
        *,
        warm: bool,
    ) -> None:
        self._order = messages.order
        self._chunks = chunks
        self._context = context
        self._warm = warm
        self._pipeline = PipelineWalk(context.pipeline, context.idle, messages, warm=warm)
        self._workspaces = sum(each.bytes for each in workspaces if warm or not each.kinds)
        self._absent = [] if warm else [each for each in workspaces if each.kinds]
        """Workspaces that their first user is yet to allocate."""
        self._new = set() if warm else {(kind, chunk) for kind in ("forward", "backward") for chunk in range(len(chunks))}
        """Passes through chunks that have not run yet, and may allocate workspaces."""
        self._waiting = 0
        """Bytes saved by microbatches in flight."""
        self._in_flight = [0] * len(chunks)
        self._left = [each.left if warm else 0 for each in chunks]
        """Bytes that checkpoints of each chunk left behind in its last backward."""
        self._leaves = any(each.left for each in chunks)
        self._highest = self._workspaces
        self._peak: tuple[int, Point] | None = None
        """The place of the highest step so far, and the instant in it."""
        self._at_peak = (self._workspaces, 0, tuple(self._in_flight))
        """Workspaces, activations and microbatches in flight at that instant."""

    def take(self, place: int, step: Step) -> None:
        """One step of the schedule."""
        number = step.chunk
        chunk = self._chunks[number]
        keeps = chunk.retained
        if self._context.first_keeps and step.microbatch == 0 and number == len(self._chunks) - 1:
            keeps += self._context.first_keeps
        forward = step.kind == "forward"
        if forward:
            self._in_flight[number] += 1
        else:
            self._waiting -= keeps
        base = self._waiting + self._pipeline.begin(place, step)
        if step.paired:
            self._overlapped(place, step, base)
        elif self._new and (step.kind, number) in self._new:
            self._first_pass(place, step, base)
        elif forward:
            self._left[number] = 0
            self._instant(place, chunk.forward_peak, base)
        else:
            point = chunk.next_backward_peak if self._left[number] else chunk.backward_peak
            self._left[number] = 0
            self._instant(place, point, base)
        if forward:
            self._waiting += keeps
        else:
            self._in_flight[number] -= 1
            self._left[number] = chunk.left
            self._pipeline.end(step)

    def skip_forward(self) -> None:
        """A forward of the only chunk that is not the peak."""
        self._in_flight[0] += 1
        self._waiting += self._chunks[0].retained

    def _instant(self, place: int, point: Point, base: int) -> None:
        """An instant that may be the peak."""
        total = self._workspaces + base + point.bytes
        if self._leaves:
            total += self._left_beside()
        if total > self._highest:
            self._highest = total
            self._peak = (place, point)
            self._at_peak = (self._workspaces, self._waiting + point.saved, tuple(self._in_flight))

    def _first_pass(self, place: int, step: Step, base: int) -> None:
        """The first forward or backward of a chunk: every instant, while workspaces are still to be allocated."""
        self._new.discard((step.kind, step.chunk))
        chunk = self._chunks[step.chunk]
        again = self._left[step.chunk]
        self._left[step.chunk] = 0
        waited_for = any(each.phase == step.kind for each in self._absent)
        if step.kind == "forward" and chunk.first_forward is not None:
            points: Iterable[Point] = chunk.first_forward.points("forward")
        elif waited_for:
            points = chunk.points(step.kind)
        elif step.kind == "forward":
            points = (chunk.forward_peak,)
        else:
            points = (chunk.next_backward_peak if again else chunk.backward_peak,)
        for point in points:
            if waited_for:
                self._appear(point)
            self._instant(place, point, base)

    def _overlapped(self, place: int, step: Step, base: int) -> None:
        """A forward that overlaps with the backward after it, of a microbatch whose saved bytes are in the overlapped peak."""
        other = self._order[place + 1].chunk
        saved = self._chunks[other].retained
        self._new.discard((step.kind, step.chunk))
        self._workspaces += sum(each.bytes for each in self._absent)
        self._absent = []
        self._left[step.chunk] = 0
        point = self._context.overlapped[step.chunk, other]
        self._waiting -= saved
        self._instant(place, point, base - saved)
        self._waiting += saved

    def _left_beside(self) -> int:
        """Bytes that checkpoints of other chunks left behind."""
        return sum(
            left + (chunk.left_input if flying else 0)
            for left, chunk, flying in zip(self._left, self._chunks, self._in_flight, strict=True)
            if left
        )

    def _appear(self, point: Point) -> None:
        """Counts the workspaces that this instant is the first to need."""
        instant = point.instant
        phase = "backward" if instant.backward else "forward"
        found = [each for each in self._absent if each.phase == phase and instant.kind in each.kinds]
        for each in found:
            self._absent.remove(each)
            self._workspaces += each.bytes

    def peak(self, messages: MessageOrder, context: PeakContext, *, warm: bool) -> Peak:
        """The highest instant, with its tensors."""
        workspaces, activations, in_flight = self._at_peak
        if self._peak is None:
            position = PeakPosition(event=PeakEvent.BETWEEN_ITERATIONS)
            return Peak(
                bytes=self._highest, workspaces=workspaces, activations=0, transient=(), in_flight=in_flight, position=position
            )
        place, point = self._peak
        step = messages.order[place]
        return Peak(
            bytes=self._highest,
            workspaces=workspaces,
            activations=activations,
            transient=(*point.transient, *_pipeline_tensors_at(place, messages, context, warm=warm)),
            in_flight=in_flight,
            position=PeakPosition(
                event=PeakEvent.FORWARD if step.kind == "forward" else PeakEvent.BACKWARD,
                step=step,
                path=point.path,
                chunks=len(self._chunks),
            ),
        )


def _pipeline_tensors_at(place: int, messages: MessageOrder, context: PeakContext, *, warm: bool) -> tuple[Tensor, ...]:
    """The tensors of the pipeline schedule beside the step at this place."""
    walk = PipelineWalk(context.pipeline, context.idle, messages, warm=warm)
    for index, step in enumerate(messages.order[:place]):
        walk.begin(index, step)
        walk.end(step)
    walk.begin(place, messages.order[place])
    return walk.tensors(place)
