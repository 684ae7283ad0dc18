"""An iteration of a pipeline rank: its steps, and which microbatches and messages exist during each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from typing import Final, NamedTuple

from analyzer.program.schedule.messages import Ring, last_input_of_warmup, waiting_messages
from analyzer.program.schedule.pipeline import Pair, Step
from analyzer.program.schedule.references import Around, Ends, Kind, Message, Pass, interleaved, of_idle, without_interleaving

_REMEMBERED: Final = 512
"""Maximum number of steps of an iteration whose moments are kept, for other layouts with the same pipeline."""


class Moment(NamedTuple):
    """What exists during one step, beside what the step itself allocates. Tuples have one element for each chunk of the rank."""

    number: int
    """The index of the step in the iteration."""
    step: Step
    others: tuple[int, ...]
    """Microbatches in flight, without that of the step."""
    left: tuple[bool, ...]
    """Whether the last pass of the chunk was a backward, also if it was in the iteration before."""
    has_run: tuple[bool, ...]
    """Whether the chunk has run before, also in an earlier iteration."""
    idle: tuple[Pass, ...]
    """In the interleaved schedule: chunks without microbatches in flight, each with the microbatch whose input it references."""
    held: tuple[Message, ...]
    """Messages that the schedule references, and that no idle chunk references."""
    waiting: int
    """Number of messages that wait for a later step than the next of their direction."""
    released: tuple[Message, ...]
    """In a forward of an idle chunk: messages that only its modules reference, until they run again."""
    exchanged: tuple[Message, ...]
    """Messages at the end of a forward, when its output is sent and the gradient for the next backward is received."""
    after_backward: bool
    """The step before is a backward."""
    first_in_flight: bool
    """The microbatch whose backward runs first is in flight in the last chunk, and does not run."""
    finished: int
    """Number of backwards of the last chunk that have ended."""
    reloads: tuple[int, int] | None
    """The chunk of the last backward, which may be this step, and that of the next one, if the forward of this one had run.

    Always None if not all steps are asked for.
    """
    sent: tuple[int, bool] | None
    """The chunk of the last backward, and whether none of its microbatches was in flight after it."""
    overlapped: bool
    """It runs as part of the step before, which is paired."""
    pair: Pair | None
    """Of a paired step."""


class Iteration:
    """The steps of an iteration of a rank."""

    def __init__(self, order: Sequence[Step], ends: Ends, ring: Ring | None = None) -> None:
        """`ring`: of the interleaved schedule."""
        self.order = tuple(order)
        self.ends = ends
        self._ring = ring

    def chunks_around(self, index: int) -> tuple[int, ...]:
        """Numbers that are equal for steps during which messages of the same kinds exist, if the same chunks are idle."""
        first, last = self._alternating
        if not first <= index < last:
            return (index,)
        around = [step.chunk for step in self.order[index - 2 : index + 3]]
        used, again = self._last_use
        return (*around, self.order[index].kind == "forward", (index > used) + (index >= again))

    @cached_property
    def _alternating(self) -> tuple[int, int]:
        """The range of steps in which forwards and backwards alternate, without its ends."""
        last = max((index for index, step in enumerate(self.order) if step.kind == "forward"), default=0)
        return self._warmup + 2, last - 2

    @cached_property
    def _last_use(self) -> tuple[int, int]:
        """The index of the backward of the last input of the warm-up, and that of the next forward of its chunk.

        Until the first one the microbatch is in flight. Until the second one the chunk can be idle, and references the input too.
        The number of steps if there is none.
        """
        end = len(self.order)
        if self._last_of_warmup is None:
            return end, end
        used = self.order.index(Step("backward", *self._last_of_warmup))
        chunk = self._last_of_warmup[1]
        after = (index for index in range(used, end) if self.order[index].kind == "forward" and self.order[index].chunk == chunk)
        return used, next(after, end)

    def moments(self, *, warm: bool, indices: Set[int] | None = None) -> Iterator[Moment]:
        """The steps in order, or those with these indices. `warm`: of an iteration after the first."""
        if indices is None or len(self.order) > _REMEMBERED:
            yield from self._moments(warm=warm, indices=indices)
            return
        known = self._known[warm]
        missing = indices - known.keys()
        if missing:
            known.update((moment.number, moment) for moment in self._moments(warm=warm, indices=missing))
        for index in sorted(indices):
            yield known[index]

    @cached_property
    def _known(self) -> tuple[dict[int, Moment], dict[int, Moment]]:
        """Steps that were asked for, by index: of the first iteration, and of a later one."""
        return {}, {}

    def _moments(self, *, warm: bool, indices: Set[int] | None) -> Iterator[Moment]:
        order, last = self.order, len(self.ends.first) - 1
        forwards, backwards = [0] * (last + 1), [0] * (last + 1)
        left, has_run = [warm] * (last + 1), [warm] * (last + 1)
        output: Pass | None = None
        last_backward: Pass | None = None
        reloads: tuple[int, int] | None = None
        sent: tuple[int, bool] | None = None
        before: Step | None = None
        for index, step in enumerate(order):
            number, forward = step.chunk, step.kind == "forward"
            forwards[number] += forward
            if not forward and indices is None:
                reloads = self._reloads(index, forwards)
            if indices is None or index in indices:
                after_forward = before is not None and before.kind == "forward"
                before_backward = index + 1 < len(order) and order[index + 1].kind == "backward"
                neighbours = (output, last_backward, *self._next(index), after_forward, before_backward)
                around = Around(step, forwards, backwards, *neighbours)
                counts = enumerate(zip(forwards, backwards, strict=True))
                others = tuple(begun - ended - (chunk == number) for chunk, (begun, ended) in counts)
                held = self._held(index, around)
                yield Moment(
                    number=index,
                    step=step,
                    others=others,
                    left=tuple(left),
                    has_run=tuple(has_run),
                    idle=self._idle(forwards, backwards, has_run),
                    held=held,
                    waiting=self._waiting[index] if self._waiting else 0,
                    released=self._released(around, held, warm=warm),
                    exchanged=self._exchanged(around, held),
                    after_backward=before is not None and not after_forward,
                    first_in_flight=forwards[last] > 0 == backwards[last] and (step.microbatch, number) != (0, last),
                    finished=backwards[last],
                    reloads=reloads,
                    sent=sent,
                    overlapped=before is not None and before.paired,
                    pair=self._pair(index, others) if step.paired else None,
                )
            before = step
            has_run[number], left[number] = True, not forward
            if forward:
                output = None if self.ends.last[number] else (step.microbatch, number)
            else:
                last_backward = (step.microbatch, number)
                backwards[number] += 1
                sent = number, forwards[number] == backwards[number]

    def _idle(self, forwards: Sequence[int], backwards: Sequence[int], has_run: Sequence[bool]) -> tuple[Pass, ...]:
        """The microbatch is -1 if it is one of the iteration before."""
        if self._ring is None:
            return ()
        idle = (chunk for chunk in self._receiving if forwards[chunk] == backwards[chunk] and has_run[chunk])
        return tuple((backwards[chunk] - 1, chunk) for chunk in idle)

    @cached_property
    def _receiving(self) -> tuple[int, ...]:
        """The chunks that receive an input."""
        return tuple(chunk for chunk, first in enumerate(self.ends.first) if not first)

    def _next(self, index: int) -> tuple[Pass | None, Pass | None]:
        """The first forward and the first backward after a step."""
        found: dict[str, Pass] = {}
        for step in self.order[index + 1 : index + 3]:
            found.setdefault(step.kind, (step.microbatch, step.chunk))
        return found.get("forward"), found.get("backward")

    def _reloads(self, index: int, forwards: Sequence[int]) -> tuple[int, int] | None:
        following = self._next(index)[1]
        if following is None or following[0] >= forwards[following[1]]:
            return None
        return self.order[index].chunk, following[1]

    def _held(self, index: int, around: Around) -> tuple[Message, ...]:
        if self._ring is None:
            found = without_interleaving(around)
        else:
            steady = self._is_steady and index >= self._warmup - 1
            last = self._last_of_warmup if steady else None
            messages = interleaved(around, steady=steady, overlaps=self._ring.overlaps, last_of_warmup=last)
            found = (each for each in messages if not around.is_of_idle(each))
        forward = around.step.kind == "forward"
        return tuple({each: None for each in found if self.ends.exists(each, forward=forward)})

    def _released(self, around: Around, held: tuple[Message, ...], *, warm: bool) -> tuple[Message, ...]:
        """In a forward of a chunk that was idle: what it referenced before, without what something else references."""
        chunk = around.step.chunk
        if self._ring is None or around.step.kind == "backward" or around.forwards[chunk] - 1 > around.backwards[chunk]:
            return ()
        if self.ends.first[chunk] or not (warm or around.backwards[chunk]):
            return ()
        return tuple(each for each in of_idle(chunk, around.backwards[chunk]) if each not in held)

    def _exchanged(self, around: Around, held: tuple[Message, ...]) -> tuple[Message, ...]:
        """`send_forward_recv_backward` of 1F1B: the output of a forward, and the gradient for the backward after it."""
        step, after = around.step, around.next_backward
        if self._ring is not None or step.kind == "backward" or after is None or not self._is_steady:
            return ()
        if not around.before_backward or self.ends.last[step.chunk]:
            return ()
        kept = tuple(each for each in held if each.kind is not Kind.INPUT)  # `output_tensor` is another one now
        output = Message(Kind.OUTPUT, step.microbatch, step.chunk)
        return (*kept, output, Message(Kind.OUTPUT_GRADIENT, *after))

    def _pair(self, index: int, others: tuple[int, ...]) -> Pair:
        """The overlapped step at this index."""
        order, ends = self.order, self.ends
        step, backward = order[index : index + 2]
        following = order[index + 2 : index + 3]
        later = order[index + 2 : index + 4] if following and following[0].paired else following
        received = [ends.last[each.chunk] if each.kind == "backward" else ends.first[each.chunk] for each in later]
        before = order[max(0, index - 1)]
        sends = self._ring is not None and self._ring.overlaps and before.kind == "backward" and not ends.first[before.chunk]
        before_it = (each for each in order[:index] if each.kind == "forward" and each.chunk == step.chunk)
        last = None if others[step.chunk] else max((each.microbatch for each in before_it), default=None)
        return Pair(
            step.chunk,
            backward.chunk,
            newest=others[backward.chunk] == 1,
            ahead=received.count(False),
            sent=sends and others[before.chunk] > 0,
            idle=last is not None,
            unused=last is not None and self._last_of_warmup == (last, step.chunk),
        )

    @cached_property
    def _warmup(self) -> int:
        """Number of forwards before the first backward."""
        return next((index for index, step in enumerate(self.order) if step.kind == "backward"), len(self.order))

    @cached_property
    def _is_steady(self) -> bool:
        """Whether forwards run after the first backward."""
        return any(step.kind == "forward" for step in self.order[self._warmup :])

    @cached_property
    def _last_of_warmup(self) -> Pass | None:
        return last_input_of_warmup(self.order, self._ring) if self._ring is not None and self._is_steady else None

    @property
    def queues_messages(self) -> bool:
        """Whether messages wait for a later step than the next of their direction."""
        return self._ring is not None and self._ring.group_size != self._ring.pipeline

    @cached_property
    def _waiting(self) -> tuple[int, ...]:
        return waiting_messages(self.order, self._ring) if self._ring is not None and self.queues_messages else ()
