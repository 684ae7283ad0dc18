"""The peak of one iteration of a rank, and the tensors allocated at the peak.

`chunk_memory` gives the memory of one microbatch, and `Iteration` the microbatches in flight and the messages at each step. `ranks`
adds the model states. Steps are compared as integers. The tensors at the peak are listed once, afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, NamedTuple

from analyzer.memory.chunk_memory import BACKWARD, ChunkMemory, Situation, Span
from analyzer.memory.first_uses import FirstUses
from analyzer.memory.highest_steps import PassBytes, highest_steps
from analyzer.memory.messages import MessageTensors
from analyzer.memory.peak import Peak, PeakPosition
from analyzer.memory.point import Exchange, Point
from analyzer.memory.workspaces import Workspace
from analyzer.modules.tree import total_bytes
from analyzer.passes.deferred_output_gradients import Deferral, output_layers
from analyzer.program.schedule.iteration import Iteration, Moment
from analyzer.program.schedule.pipeline import Pair
from analyzer.program.schedule.references import Kind, Message
from analyzer.results import PeakEvent


@dataclass(frozen=True, kw_only=True)
class PeakContext:
    """Memory of a rank in addition to the microbatches in flight."""

    messages: MessageTensors | None = None
    """None: the messages of the schedule are not counted."""
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
    flight, in addition to its last input."""
    sent: Sequence[int] = ()
    """With overlapped microbatches: for each chunk, bytes of the gradient that is sent after its backward. It is not the gradient
    of the received input, and is referenced until the next one is sent."""
    extra_of_first: int = 0
    """Additional bytes saved by the microbatch whose backward runs first."""
    deferral: Deferral | None = None
    """The deferred weight gradients of the output layer, which is in the last chunk."""

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether steps that differ in the numbers of their microbatches only can differ in memory."""
        first_stays = self.messages is not None and self.messages.first_stays
        return bool(first_stays or self.planned or self.extra_of_first or self.deferral or self.offloaded[0])


def peak_of_iteration(
    iteration: Iteration,
    chunks: Sequence[ChunkMemory],
    *,
    context: PeakContext,
    workspaces: Sequence[Workspace] = (),
    warm: bool = False,
) -> Peak:
    """The peak of an iteration, in bytes above the model states.

    If `warm`, all workspaces and caches exist from the start; otherwise each is allocated by the first module that uses it.
    """
    steps = _Steps(chunks, context, workspaces, warm=warm)
    for moment in iteration.moments(warm=warm, indices=steps.candidates(iteration)):
        steps.visit(moment)
    return steps.peak()


def step_bytes(
    iteration: Iteration, chunks: Sequence[ChunkMemory], *, context: PeakContext, workspaces: Sequence[Workspace] = ()
) -> list[tuple[int, int]]:
    """For each step of an iteration after the first, bytes above the model states at the peak of the step and after it."""
    steps = _Steps(chunks, context, workspaces, warm=True)
    return [(steps.peak_alone(moment), steps.kept_after(moment)) for moment in iteration.moments(warm=True)]


_SITUATIONS: Final = {flags: Situation(*flags) for flags in product((False, True), repeat=3)}
"""Every kind of pass of a chunk."""
Place = Situation | Point | Exchange
"""Where a peak can be in a step: the highest instant of a pass of the chunk, another instant, or the messages after it."""


class _DeferredCalls:
    """Calls of the output layer whose weight gradients are deferred, after a number of backwards of its chunk."""

    def __init__(self, deferral: Deferral, chunk: ChunkMemory) -> None:
        self.deferral = deferral
        self.in_backward = sum(span.block.derived(output_layers) for span in chunk.spans(BACKWARD))
        """Number of calls in a backward."""

    def number(self, backwards: int) -> int:
        """Number of deferred calls."""
        return min(backwards * self.in_backward, self.deferral.calls)

    def microbatches(self, backwards: int) -> int:
        """Number of microbatches with deferred calls."""
        return min(backwards, -(-self.deferral.calls // self.in_backward)) if self.in_backward else 0

    def operand_bytes(self, backwards: int) -> int:
        """Bytes of the operands. Of a microbatch with some deferred calls, the inputs of all calls are kept."""
        number = self.number(backwards)
        others = self.microbatches(backwards) * self.in_backward - number
        return number * self.deferral.bytes_each + others * self.deferral.input_bytes

    def keeps_graph(self, backwards: int) -> bool:
        """Whether the graph of the last of these backwards is kept."""
        return backwards > 0 and self.number(backwards - 1) < self.deferral.calls and self.deferral.graph_bytes > 0


class _Highest(NamedTuple):
    """The highest instant so far."""

    moment: Moment
    place: Place
    workspaces: int
    saved: int
    """Bytes saved by other microbatches, and left by checkpoints."""


class _Steps:
    """The steps of an iteration, of which the highest instant is remembered. All sizes are in bytes."""

    def __init__(
        self,
        chunks: Sequence[ChunkMemory],
        context: PeakContext,
        workspaces: Sequence[Workspace],
        *,
        warm: bool,
    ) -> None:
        self._chunks = chunks
        self._context = context
        self._uses = FirstUses(workspaces, warm=warm)
        self._first_passes = set() if warm else {(kind, chunk) for kind in ("forward", "backward") for chunk in range(len(chunks))}
        """Passes of chunks that have not run yet."""
        self._overlaps = bool(context.planned)
        self._deferred = None if context.deferral is None else _DeferredCalls(context.deferral, chunks[-1])
        self._planned = context.planned or [0] * len(chunks)
        self._retained = [chunk.retained + batch for chunk, batch in zip(chunks, self._planned, strict=True)]
        """For each chunk, bytes saved by a microbatch in flight."""
        self._has_leftover = any(chunk.leftover for chunk in chunks)
        self._bytes = self._uses.bytes
        self._at: _Highest | None = None

    def candidates(self, iteration: Iteration) -> frozenset[int] | None:
        """The indices of the steps that can be the highest, and of first passes; None for all."""
        depends = self._has_leftover or self._context.depends_on_microbatches or any(chunk.reloaded for chunk in self._chunks)
        if depends or iteration.queues_messages:
            return None
        largest = 0 if self._context.messages is None else self._context.messages.largest
        return highest_steps(iteration, tuple(map(PassBytes.of, self._chunks)), largest)

    def visit(self, moment: Moment) -> None:
        """Updates the peak with the instants of a step."""
        step = moment.step
        number, forward = step.chunk, step.kind == "forward"
        chunk = self._chunks[number]
        alone = not forward and not moment.others[number] and not self._overlaps
        situation = _SITUATIONS[not forward, alone, self._has_leftover and moment.left[number]]
        saved = self._saved(moment) + self._kept_graphs(moment)
        base = saved + self._outside(moment)
        if moment.overlapped:
            return  # the paired forward before it has its instants
        if moment.pair is not None:
            self._overlapped(moment, moment.pair, saved, base)
        elif self._deferred is not None and not forward and number == len(self._chunks) - 1:
            self._deferring_backward(moment, situation, saved, base, self._deferred)
        elif self._first_passes and (step.kind, number) in self._first_passes:
            self._first_pass(moment, situation, saved, base)
        else:
            self._update(moment, situation, saved, base + chunk.peak(situation))
        self._released(moment, saved, base)

    def _released(self, moment: Moment, saved: int, base: int) -> None:
        """Messages in a forward that are not allocated throughout it."""
        messages, chunk = self._context.messages, self._chunks[moment.step.chunk]
        if messages is None or moment.pair is not None:
            return
        point = chunk.before_dispatch if moment.released else None
        if point is not None:
            outside = messages.of(moment.released)
            higher = point._replace(bytes=point.bytes + total_bytes(outside), outside=(*point.outside, *outside))
            self._update(moment, higher, saved, base + higher.bytes)
        if moment.exchanged:
            exchange = Exchange(chunk.retained, messages.of(moment.exchanged))
            self._update(moment, exchange, saved, base - messages.bytes(moment.held) + exchange.bytes)

    def _saved(self, moment: Moment) -> int:
        """Bytes saved by the other microbatches in flight, left by checkpoints, and kept for deferred weight gradients."""
        found = 0
        for count, retained in zip(moment.others, self._retained, strict=True):
            found += count * retained
        if self._has_leftover:
            found += self._left_by_others(moment)
        if moment.step.kind == "backward":
            found += self._planned[moment.step.chunk]
        if moment.first_in_flight:
            found += self._context.extra_of_first
        if moment.reloads is not None and moment.step.kind == "forward":
            found += self._reloaded(*moment.reloads)
        if self._deferred is not None:
            found += self._deferred.operand_bytes(moment.finished)
        return found

    def _left_by_others(self, moment: Moment) -> int:
        """Bytes that checkpoints of other chunks did not free. Of an idle chunk the input is counted as a message."""
        found = 0
        for number, (chunk, left) in enumerate(zip(self._chunks, moment.left, strict=True)):
            if left and chunk.leftover and number != moment.step.chunk:
                found += chunk.leftover + (chunk.leftover_input if moment.others[number] else 0)
        return found

    def _reloaded(self, ended: int, following: int) -> int:
        """Bytes that the backward of a chunk has copied back from the host for that of the next one."""
        return self._chunks[following].reloaded if self._chunks[ended].reloaded else 0

    def _outside(self, moment: Moment) -> int:
        """Bytes of the messages of the schedule, and of what modules of other microbatches reference."""
        context = self._context
        found = 0 if context.messages is None else context.messages.bytes_at(moment)
        chunk = self._chunks[moment.step.chunk]
        follows_backward = moment.after_backward and moment.step.kind == "forward"
        if chunk.graph and follows_backward and len(self._chunks) == 1 and not self._overlaps:
            kept = self._deferred is not None and self._deferred.keeps_graph(moment.finished)
            found += 0 if kept else chunk.graph
        if self._overlaps:
            found += (
                self._referenced_by_dispatchers(self._without_microbatches(moment))
                + self._sent(moment.sent)
                + context.offloaded[1].get(moment.number, 0)
            )
        return found

    def _without_microbatches(self, moment: Moment) -> list[bool]:
        """For each chunk, whether it has run, and none of its microbatches is in flight."""
        both = zip(moment.has_run, moment.others, strict=True)
        return [has_run and not count and chunk != moment.step.chunk for chunk, (has_run, count) in enumerate(both)]

    def _referenced_by_dispatchers(self, idle: Sequence[bool]) -> int:
        return sum(left for left, is_idle in zip(self._context.left, idle, strict=True) if is_idle)

    def _sent(self, sent: tuple[int, bool] | None) -> int:
        """The gradient that was sent last; the dispatchers of an idle chunk reference it too, if they reference inputs."""
        if sent is None or not self._context.sent:
            return 0
        number, idle = sent
        return 0 if idle and self._context.left[number] > 0 else self._context.sent[number]

    def _kept_graphs(self, moment: Moment) -> int:
        """Bytes that autograd graphs of deferred calls keep, beyond the messages of the schedule."""
        deferred, messages = self._deferred, self._context.messages
        if deferred is None or messages is None:
            return 0
        number = deferred.microbatches(moment.finished)
        last = len(self._chunks) - 1
        both = (Kind.INPUT, Kind.INPUT_GRADIENT)
        inputs = [each for each in moment.held if each.kind in both and each.chunk == last]
        inputs += [Message(kind, *each) for each in moment.idle for kind in both if each[1] == last]
        counted = messages.bytes([each for each in inputs if 0 <= each.microbatch < number])
        graphs = deferred.deferral.graph_bytes
        handles = number * self._chunks[last].graph if graphs else 0
        return handles + max(0, number * graphs - counted)

    def _first_pass(self, moment: Moment, situation: Situation, saved: int, base: int) -> None:
        """The first forward or backward of a chunk. Every instant is visited if workspaces are still to be allocated."""
        step = moment.step
        self._first_passes.discard((step.kind, step.chunk))
        chunk = self._chunks[step.chunk]
        if step.kind == "forward" and chunk.first_forward is not None:
            chunk = chunk.first_forward
        elif not self._uses.remain(step.kind):
            self._update(moment, situation, saved, base + chunk.peak(situation))
            return
        for span in chunk.spans(situation):
            self._visit_instants(moment, span, saved, base)

    def _visit_instants(self, moment: Moment, span: Span, saved: int, base: int) -> None:
        """Updates the peak with every instant of a block, and allocates the workspaces that it uses."""
        self._uses.start(span.times)
        for instant, allocated in span.levels(backward=moment.step.kind == "backward"):
            size = base + allocated - self._uses.allocate(span.block, instant)
            if self._uses.bytes + size > self._bytes:
                self._update(moment, span.point(instant, allocated), saved, size)

    def _deferring_backward(self, moment: Moment, situation: Situation, saved: int, base: int, deferred: _DeferredCalls) -> None:
        """A backward of the last chunk. From the backward of an output layer on, the operands of its weight gradient are kept."""
        self._first_passes.discard((moment.step.kind, moment.step.chunk))
        before = deferred.number(moment.finished)
        kept = 0
        for span in self._chunks[-1].spans(situation):
            self._visit_instants(moment, span, saved + kept, base + kept)
            calls = min(span.block.derived(output_layers), deferred.deferral.calls - before)
            before += calls
            kept += calls * deferred.deferral.bytes_each

    def _overlapped(self, moment: Moment, pair: Pair, saved: int, base: int) -> None:
        """A forward that overlaps with the backward after it. The overlapped peak includes the saved bytes of that backward."""
        context = self._context
        other = self._retained[pair.backward]
        self._first_passes -= {("forward", pair.forward), ("backward", pair.backward)}
        self._uses.allocate_all()
        deferred, last = self._deferred, len(self._chunks) - 1
        defers = deferred is not None and pair.backward == last and deferred.number(moment.finished) < deferred.deferral.calls
        point = context.offloaded[0].get(moment.number) or (context.deferring if defers else context.overlapped)[pair]
        self._update(moment, point, saved - other, base - other + point.bytes)

    def _update(self, moment: Moment, place: Place, saved: int, size: int) -> None:
        """Updates the peak with `size` bytes beside the workspaces, at a place in a step."""
        total = self._uses.bytes + size
        if total > self._bytes:
            self._bytes = total
            self._at = _Highest(moment, place, self._uses.bytes, saved)

    def peak_alone(self, moment: Moment) -> int:
        """Bytes at the peak of one step. `peak` is then not that of the iteration."""
        self._bytes = 0
        self.visit(moment)
        if moment.overlapped:
            return 0
        return self._bytes

    def kept_after(self, moment: Moment) -> int:
        """After a step: bytes of the workspaces, of what microbatches in flight have saved, and of what idle chunks reference."""
        number, forward = moment.step.chunk, moment.step.kind == "forward"
        last = number == len(self._chunks) - 1
        ends = not forward and not moment.others[number]
        after = moment._replace(
            step=replace(moment.step, kind="forward"),  # the following step has not begun
            others=tuple(count + (forward and chunk == number) for chunk, count in enumerate(moment.others)),
            first_in_flight=moment.first_in_flight or (forward and last and moment.step.microbatch == 0),
            finished=moment.finished + (last and not forward),
        )
        found = self._uses.bytes + self._saved(after) + (0 if forward else self._chunks[number].leftover)
        if self._overlaps:
            idle = [each or (ends and chunk == number) for chunk, each in enumerate(self._without_microbatches(moment))]
            found += self._referenced_by_dispatchers(idle) + self._sent(moment.sent if forward else (number, ends))
        return found

    def peak(self) -> Peak:
        """The peak, with its tensors."""
        at = self._at
        if at is None:
            return Peak(
                bytes=self._bytes,
                workspaces=self._uses.bytes,
                activations=0,
                transient=(),
                in_flight=tuple(0 for _ in self._chunks),
                position=PeakPosition(event=PeakEvent.BETWEEN_ITERATIONS),
            )
        moment = at.moment
        step, messages = moment.step, self._context.messages
        point = self._chunks[step.chunk].highest(at.place) if isinstance(at.place, Situation) else at.place
        held = () if messages is None or isinstance(point, Exchange) else messages.at(moment)
        return Peak(
            bytes=self._bytes,
            workspaces=at.workspaces,
            activations=at.saved + point.saved,
            transient=(*point.transient, *held),
            in_flight=tuple(count + (chunk == step.chunk) for chunk, count in enumerate(moment.others)),
            position=PeakPosition(
                event=PeakEvent.FORWARD if step.kind == "forward" else PeakEvent.BACKWARD,
                step=step,
                path=point.path,
                chunks=len(self._chunks),
            ),
        )
