"""The peak of one iteration of a rank, and the tensors allocated at the peak.

`chunk_memory` gives the memory of one microbatch, and the schedule gives the microbatches in flight. `ranks` adds the model states.
The walk over the steps uses integers only. The tensors at the peak are collected once, after the walk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

from analyzer.memory.chunk_memory import BACKWARD, ChunkMemory, Situation
from analyzer.memory.peak import Peak, PeakPosition
from analyzer.memory.pipeline_tensors import PREVIOUS, MessageOrder, PipelineTensors, PipelineWalk, tensors_at
from analyzer.memory.point import Exchange, Point
from analyzer.memory.workspaces import Workspace
from analyzer.modules.norm import PARTIAL_SUMS
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.passes.deferred_output_gradients import Deferral, output_layers
from analyzer.results import PeakEvent
from analyzer.schedule.pipeline import Pair, Step, next_backwards


@dataclass(frozen=True, kw_only=True)
class PeakContext:
    """Memory of a rank in addition to the microbatches in flight."""

    pipeline: PipelineTensors = field(default_factory=PipelineTensors)
    idle: Sequence[tuple[Tensor, ...]] = ()
    """For each chunk, the tensors that it references while none of its microbatches is in flight, after its first forward."""
    overlapped: Mapping[Pair, Point] = field(default_factory=dict)
    """The peaks of overlapped steps."""
    deferring: Mapping[Pair, Point] = field(default_factory=dict)
    """The same if the backward of the output layer defers its weight gradient."""
    offloaded: tuple[Mapping[int, Point], Mapping[int, int]] = ({}, {})
    """With overlapped microbatches and activation offloading: for each index of an overlapped step its peak, and for each other
    index bytes of offloaded tensors on the GPU."""
    planned: Sequence[int] = ()
    """With overlapped microbatches: for each chunk, bytes of the batch, which a schedule plan references until the backward."""
    left: Sequence[int] = ()
    """With overlapped microbatches: for each chunk, bytes that its dispatchers reference while none of its microbatches is in
    flight, in addition to `idle`."""
    sent: Sequence[int] = ()
    """With overlapped microbatches: for each chunk, bytes of the gradient that is sent after its backward. It is not the gradient
    of the received input, and is referenced until the next one is sent."""
    extra_of_first: int = 0
    """Additional bytes saved by the microbatch whose backward runs first."""
    deferral: Deferral | None = None
    """The deferred weight gradients of the output layer, which is in the last chunk."""


def peak_of_iteration(
    messages: MessageOrder,
    chunks: Sequence[ChunkMemory],
    *,
    context: PeakContext,
    workspaces: Sequence[Workspace] = (),
    warm: bool = False,
) -> Peak:
    """The peak of an iteration, in bytes above the model states.

    `messages` contains the steps of the iteration. If `warm`, all workspaces and caches exist from the start; otherwise each is
    allocated by the first module that uses it.
    """
    walk = _Walk(messages, chunks, context, workspaces, warm=warm)
    order = messages.order
    skipped, end = _lower_steps(order, chunks) if context.deferral is None else (range(0), len(order))
    for index in range(end):
        if index in skipped:
            walk.skip_forward(order[index])
        else:
            walk.run(index, order[index])
    return walk.peak(messages, context, warm=warm)


def step_bytes(
    messages: MessageOrder, chunks: Sequence[ChunkMemory], *, context: PeakContext, workspaces: Sequence[Workspace] = ()
) -> list[tuple[int, int]]:
    """For each step of an iteration after the first, bytes above the model states at the peak of the step and after it."""
    walk = _Walk(messages, chunks, context, workspaces, warm=True)
    found = []
    for index, step in enumerate(messages.order):
        peak = walk.run_alone(index, step)
        found.append((peak, walk.kept))
    return found


def _lower_steps(order: Sequence[Step], chunks: Sequence[ChunkMemory]) -> tuple[range, int]:
    """Forwards of the warm-up that cannot be the peak, and the number of steps after which none can be the peak.

    With one chunk every forward of the warm-up has one more microbatch in flight, and every backward of the cool-down one less.
    The first steps of each kind are not skipped: they may allocate workspaces, or run without leftovers of checkpoints.
    """
    if len(chunks) > 1 or any(step.paired for step in order[:2]):
        return range(0), len(order)
    warmup = next((place for place, step in enumerate(order) if step.kind == "backward"), 0)
    last = len(order)
    while last and order[last - 1].kind == "backward":
        last -= 1
    return range(2, warmup - 1), min(len(order), last + 3)


_SITUATIONS: Final = {flags: Situation(*flags) for flags in product((False, True), repeat=3)}
"""Every kind of pass of a chunk."""
Place = Situation | Point | Exchange
"""Where a peak can be in a step: the highest instant of a pass of the chunk, another instant, or the messages after it."""


class _AtPeak(NamedTuple):
    """The highest instant so far."""

    step: int
    """The index of the step."""
    place: Place
    workspaces: int
    saved: int
    """Bytes saved by other microbatches, and left by checkpoints."""
    in_flight: tuple[int, ...]


class _Walk:
    """A walk over the steps of an iteration. All sizes are in bytes."""

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
        self._messages = messages
        self._chunks = chunks
        self._context = context
        self._pipeline = PipelineWalk(context.pipeline, context.idle, messages, warm=warm)
        self._workspaces = sum(each.bytes for each in workspaces if warm or not each.kinds)
        self._not_allocated = [] if warm else [each for each in workspaces if each.kinds]
        """Workspaces that are not allocated yet."""
        self._first_passes = set() if warm else {(kind, chunk) for kind in ("forward", "backward") for chunk in range(len(chunks))}
        """Passes of chunks that have not run yet; their first run may allocate workspaces."""
        self._left = [warm and each.leftover > 0 for each in chunks]
        """For each chunk, whether what its checkpoints did not free in its last backward is allocated."""
        self._saved = sum(each.leftover for each in chunks) if warm else 0
        """Bytes saved by microbatches in flight, and left by checkpoints."""
        self._in_flight = [0] * len(chunks)
        self._has_inputs_left = any(each.leftover and each.leftover_input for each in chunks)
        self._overlaps = bool(context.planned)
        self._idle = list(context.left) if warm and context.left else [0] * len(chunks)
        """For each chunk, bytes that its dispatchers reference because no microbatch of it is in flight."""
        self._sent = 0
        """Bytes of the gradient that is being sent."""
        self._reloaded = 0
        """Bytes copied back from the host for the next backward, whose forward has finished."""
        self._following = next_backwards(self._order) if any(each.reloaded for each in chunks) else ()
        """For each step, the first backward after it."""
        self._forwards_done: set[tuple[int, int]] = set()
        """Microbatches and chunks whose forward has run."""
        self._deferred_calls = 0
        """Calls of the output layer whose weight gradients are deferred, so far."""
        self._deferred_last = False
        """Whether the graph of the last backward is among those of deferred calls."""
        self._deferring = 0
        """Microbatches with such calls whose backward has finished."""
        self._highest = self._workspaces
        self._at_peak: _AtPeak | None = None

    def run(self, index: int, step: Step) -> None:
        """Runs one step of the schedule."""
        number = step.chunk
        chunk = self._chunks[number]
        saved = chunk.retained
        planned = self._context.planned[number] if self._overlaps else 0
        if self._context.extra_of_first and step.microbatch == 0 and number == len(self._chunks) - 1:
            saved += self._context.extra_of_first
        forward = step.kind == "forward"
        if forward:
            if self._overlaps and not self._in_flight[number]:
                self._idle[number] = 0
            self._in_flight[number] += 1
        else:
            self._saved -= saved + self._reloaded
            self._reloaded = 0
        alone = not forward and self._in_flight[number] == 1 and not self._overlaps
        situation = _SITUATIONS[not forward, alone, self._left[number]]
        if situation.left:
            self._saved -= chunk.leftover
            self._left[number] = False
        self._visit_instants(index, step, situation)
        if forward:
            self._saved += saved + planned
            if self._following:
                self._forwards_done.add((step.microbatch, step.chunk))
        else:
            self._end_backward(index, step, planned)

    def _end_backward(self, index: int, step: Step, planned: int) -> None:
        number = step.chunk
        chunk = self._chunks[number]
        self._saved += chunk.leftover - planned
        self._left[number] = chunk.leftover > 0
        self._in_flight[number] -= 1
        if self._context.left:
            self._idle[number] = 0 if self._in_flight[number] else self._context.left[number]
            # the dispatchers of an idle chunk reference it too, if they reference inputs
            self._sent = self._context.sent[number] if self._idle[number] <= 0 else 0
        self._pipeline.end(step)
        if chunk.reloaded:
            self._reload(index)

    def _visit_instants(self, index: int, step: Step, situation: Situation) -> None:
        """Updates the peak with the instants of a step."""
        pipeline = self._pipeline.begin(index, step)
        kept = self._kept_graphs(index) if self._context.deferral is not None else 0
        self._saved += kept
        base = self._saved + pipeline
        number, forward = step.chunk, not situation.backward
        chunk = self._chunks[number]
        if forward and chunk.graph and index and len(self._chunks) == 1 and not self._overlaps:
            referenced = self._order[index - 1].kind == "backward" and not self._deferred_last
            base += chunk.graph if referenced else 0
        if self._overlaps:
            base += sum(self._idle) + self._sent + self._context.offloaded[1].get(index, 0)
        if step.paired:
            self._overlapped(index, step, base)
        elif index and self._order[index - 1].paired:
            pass  # the overlapped forward before it has its instants
        elif not forward and self._context.deferral is not None and number == len(self._chunks) - 1:
            self._deferring_backward(index, step, situation, base, self._context.deferral)
        elif self._first_passes and (step.kind, number) in self._first_passes:
            self._first_pass(index, step, situation, base)
        else:
            self._update_peak(index, situation, base, chunk.peak(situation))
            if forward and self._pipeline.released:
                self._before_dispatch(index, chunk, base)
        self._saved -= kept
        if forward and self._context.pipeline.exchanged and self._messages.situations[index].awaits:
            self._exchange(index, chunk, base)

    def _before_dispatch(self, index: int, chunk: ChunkMemory, base: int) -> None:
        """The forward of a chunk that was idle: until its last dispatch, dispatchers reference the last input of the chunk."""
        point = chunk.before_dispatch
        if point is not None:
            outside = self._pipeline.released
            more = point.bytes + total_bytes(outside)
            self._update_peak(index, point._replace(bytes=more, outside=(*point.outside, *outside)), base, more)

    def _exchange(self, index: int, chunk: ChunkMemory, base: int) -> None:
        """The messages after a forward. Its output is assigned to `output_tensor`, which referenced the previous one before."""
        pipeline = self._context.pipeline
        previous = (each for each in pipeline.alive_during(self._messages.situations[index]) if each.name == PREVIOUS)
        exchange = Exchange(chunk.retained, pipeline.exchanged)
        self._update_peak(index, exchange, base - total_bytes(previous), exchange.bytes)

    def _reload(self, index: int) -> None:
        """Counts what the backward at `index` copied back for the next one."""
        following = self._following[index]
        if following is None:
            return
        done = (following.microbatch, following.chunk) in self._forwards_done
        self._reloaded = self._chunks[following.chunk].reloaded if done else 0
        self._saved += self._reloaded

    def run_alone(self, index: int, step: Step) -> int:
        """Runs one step and returns the bytes at its own peak. `peak` is then not that of the iteration."""
        self._highest = 0
        self.run(index, step)
        return self._highest

    @property
    def kept(self) -> int:
        """Bytes of the workspaces, of what the microbatches in flight have saved, and of what idle chunks reference."""
        return self._workspaces + self._saved + sum(self._idle) + self._sent

    def skip_forward(self, step: Step) -> None:
        """A forward of the only chunk that cannot be the peak."""
        if self._following:
            self._forwards_done.add((step.microbatch, step.chunk))
        self._in_flight[0] += 1
        self._saved += self._chunks[0].retained

    def _update_peak(self, index: int, place: Place, base: int, size: int) -> None:
        """Updates the peak with `size` bytes above `base`, at a place in a step."""
        total = self._workspaces + base + size + self._inputs_left
        if total > self._highest:
            self._highest = total
            self._at_peak = _AtPeak(index, place, self._workspaces, self._saved, tuple(self._in_flight))

    def _first_pass(self, index: int, step: Step, situation: Situation, base: int) -> None:
        """The first forward or backward of a chunk. Every instant is visited if workspaces are still to be allocated."""
        self._first_passes.discard((step.kind, step.chunk))
        chunk = self._chunks[step.chunk]
        if step.kind == "forward" and chunk.first_forward is not None:
            chunk = chunk.first_forward
        elif not any(each.phase == step.kind for each in self._not_allocated):
            self._update_peak(index, situation, base, chunk.peak(situation))
            return
        for point in chunk.points(situation):
            self._update_peak(index, point, base - self._allocate(point), point.bytes)

    def _kept_graphs(self, index: int) -> int:
        """Bytes that autograd graphs of deferred calls keep during this step, beyond the tensors of the pipeline schedule."""
        if self._context.deferral is None or not self._deferring:
            return 0
        counted = self._pipeline.finished_inputs(index, len(self._chunks) - 1, microbatches=self._deferring)
        handles = self._deferring * self._chunks[-1].graph if self._context.deferral.graph_bytes else 0
        return handles + max(0, self._deferring * self._context.deferral.graph_bytes - counted)

    def _deferring_backward(self, index: int, step: Step, situation: Situation, base: int, deferral: Deferral) -> None:
        """A backward of the last chunk. From the backward of an output layer on, the operands of its weight gradient are kept."""
        self._first_passes.discard((step.kind, step.chunk))
        chunk = self._chunks[step.chunk]
        before = self._deferred_calls
        self._deferred_last = self._deferred_calls < deferral.calls and deferral.graph_bytes > 0
        self._deferring += self._deferred_calls < deferral.calls
        spans = chunk.spans(situation)
        for span in spans:
            for point in span.points(backward=True):
                self._update_peak(index, point, base - self._allocate(point), point.bytes)
            calls = min(span.block.derived(output_layers), deferral.calls - self._deferred_calls)
            self._deferred_calls += calls
            self._saved += calls * deferral.bytes_each
            base += calls * deferral.bytes_each
        if self._deferred_calls > before:
            outputs = sum(span.block.derived(output_layers) for span in spans)
            self._saved += max(0, before + outputs - self._deferred_calls) * deferral.input_bytes

    def _overlapped(self, index: int, step: Step, base: int) -> None:
        """A forward that overlaps with the backward after it. The overlapped peak includes the saved bytes of that backward."""
        other = self._order[index + 1].chunk
        saved = self._chunks[other].retained + (self._context.planned[other] if self._context.planned else 0)
        in_flight = [count - (chunk == step.chunk) for chunk, count in enumerate(self._in_flight)]
        self._first_passes -= {(step.kind, step.chunk), ("backward", other)}
        self._workspaces += sum(each.bytes for each in self._not_allocated if each.phase != "optimizer")
        self._not_allocated = [each for each in self._not_allocated if each.phase == "optimizer"]
        calls = self._calls_to_defer(other)
        points = self._context.deferring if calls else self._context.overlapped
        point = self._context.offloaded[0].get(index) or points[self._messages.pair(index, in_flight)]
        self._saved -= saved
        self._update_peak(index, point, base - saved, point.bytes)
        if calls and self._context.deferral is not None:
            self._deferred_calls += calls
            saved += calls * self._context.deferral.bytes_each
        self._saved += saved

    def _calls_to_defer(self, number: int) -> int:
        """Calls of output layers in the next backward of a chunk whose weight gradients are deferred."""
        deferral = self._context.deferral
        if deferral is None or number != len(self._chunks) - 1:
            return 0
        calls = sum(span.block.derived(output_layers) for span in self._chunks[number].spans(BACKWARD))
        return min(calls, deferral.calls - self._deferred_calls)

    @property
    def _inputs_left(self) -> int:
        """Bytes of inputs of checkpoints that stayed allocated in chunks with other microbatches in flight."""
        if not self._has_inputs_left:
            return 0
        each = zip(self._left, self._chunks, self._in_flight, strict=True)
        return sum(chunk.leftover_input for left, chunk, in_flight in each if left and in_flight)

    def _allocate(self, point: Point) -> int:
        """Allocates the workspaces that are used for the first time at this instant. Returns bytes of it that are freed before."""
        instant = point.instant
        phase = "backward" if instant.backward else "forward"
        waiting = (each for each in self._not_allocated if each.recomputed or not instant.recomputed)
        using = (each for each in waiting if each.phase == phase and instant.kind in each.kinds)
        found = [each for each in using if not each.weight or each.weight == instant.weight]
        for each in found:
            self._not_allocated.remove(each)
            self._workspaces += each.bytes
        dummies = sum(each.bytes for each in found if each.weight)
        return min(dummies, sum(each.bytes for each in point.transient if each.name == PARTIAL_SUMS)) if dummies else 0

    def peak(self, messages: MessageOrder, context: PeakContext, *, warm: bool) -> Peak:
        """The peak, with its tensors."""
        at = self._at_peak
        if at is None:
            return Peak(
                bytes=self._highest,
                workspaces=self._workspaces,
                activations=0,
                transient=(),
                in_flight=tuple(0 for _ in self._chunks),
                position=PeakPosition(event=PeakEvent.BETWEEN_ITERATIONS),
            )
        step = messages.order[at.step]
        point = self._chunks[step.chunk].highest(at.place) if isinstance(at.place, Situation) else at.place
        pipeline = tensors_at(at.step, context.pipeline, context.idle, messages, warm=warm)
        if isinstance(point, Exchange):
            pipeline = tuple(each for each in pipeline if each.name != PREVIOUS)
        return Peak(
            bytes=self._highest,
            workspaces=at.workspaces,
            activations=at.saved + point.saved,
            transient=(*point.transient, *pipeline),
            in_flight=at.in_flight,
            position=PeakPosition(
                event=PeakEvent.FORWARD if step.kind == "forward" else PeakEvent.BACKWARD,
                step=step,
                path=point.path,
                chunks=len(self._chunks),
            ),
        )
