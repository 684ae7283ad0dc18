"""An iteration of a pipeline rank: its steps, and which microbatches and messages exist during each of them.

Nothing in it depends on sizes, so that all layouts with the same pipeline share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from operator import and_, le
from typing import Final, NamedTuple

from analyzer.schedule.messages import Ring, last_input_of_warmup, waiting_messages
from analyzer.schedule.pipeline import Pair, Step, next_backwards, steps
from analyzer.schedule.references import BEFORE, Ends, Kind, Message, Pass, references

_KINDS: Final = tuple(Kind)


class Moment(NamedTuple):
    """What exists during one step, beside what the step itself allocates. Tuples have one element for each chunk of the rank."""

    step: Step
    others: tuple[int, ...]
    """Microbatches in flight, without that of the step."""
    left: tuple[bool, ...]
    """Whether the last pass of the chunk was a backward, also if it was in the iteration before."""
    has_run: tuple[bool, ...]
    """Whether the chunk has run before, also in an earlier iteration."""
    held: tuple[Message, ...]
    """Messages that the schedule references."""
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
    reloading: tuple[int, int] | None
    """In a forward: `reloads` of the last backward."""
    reloads: tuple[int, int] | None
    """In a backward: its chunk, and that of the next backward, if the forward of that microbatch has run."""
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

    def moments(self, *, warm: bool) -> tuple[Moment, ...]:
        """Every step. `warm`: of an iteration after the first."""
        return self._later if warm else self._first

    @cached_property
    def _first(self) -> tuple[Moment, ...]:
        """As in a later iteration, without what is left of the iteration before."""
        if self._ring is None:
            return tuple(self._moments(warm=False))
        found = list(self._later)
        run: set[int] = set()
        for index, moment in enumerate(found):
            if len(run) == len(self.ends.first):
                break
            ran = tuple(chunk in run for chunk in range(len(self.ends.first)))
            found[index] = moment._replace(
                held=tuple(each for each in moment.held if each.microbatch != BEFORE),
                released=tuple(each for each in moment.released if each.microbatch != BEFORE),
                left=tuple(map(and_, moment.left, ran)),
                has_run=ran,
            )
            run.add(moment.step.chunk)
        return tuple(found)

    @cached_property
    def _later(self) -> tuple[Moment, ...]:
        return tuple(self._moments(warm=True))

    def highest(self, *, warm: bool) -> tuple[int, ...]:
        """The indices of the steps that can have the highest memory, whatever the sizes of tensors are, in order.

        Another step has no more microbatches in flight and no more messages of any kind than one of these of the same kind. In the
        first iteration the first pass of each kind is among them.
        """
        return self._highest_later if warm else self._highest_first

    @cached_property
    def _highest_first(self) -> tuple[int, ...]:
        return _highest(self._first, first=True)

    @cached_property
    def _highest_later(self) -> tuple[int, ...]:
        return _highest(self._later, first=False)

    def _moments(self, *, warm: bool) -> Iterator[Moment]:
        order, last = self.order, len(self.ends.first) - 1
        state = references(order, self.ends, self._ring, warm=warm)
        waiting = () if self._ring is None or self._ring.group_size == self._ring.pipeline else waiting_messages(order, self._ring)
        following = next_backwards(order)
        in_flight = [0] * (last + 1)
        left = has_run = (warm,) * (last + 1)
        forwards: set[Pass] = set()
        first_in_flight = False
        finished = 0
        reloading: tuple[int, int] | None = None
        sent: tuple[int, bool] | None = None
        before: Step | None = None
        for index, step in enumerate(order):
            number, forward = step.chunk, step.kind == "forward"
            released = state.begin(index)
            reloads = None
            if not forward:
                in_flight[number] -= 1
                first_in_flight = first_in_flight and (step.microbatch > 0 or number < last)
                after = following[index]
                if after is not None and (after.microbatch, after.chunk) in forwards:
                    reloads = number, after.chunk
            others = tuple(in_flight)
            held = state.held(step)
            state.end(index)
            yield Moment(
                step=step,
                others=others,
                left=left,
                has_run=has_run,
                held=held,
                waiting=waiting[index] if waiting else 0,
                released=released,
                exchanged=self._exchanged(index, state.held(step)) if forward and self._ring is None else (),
                after_backward=before is not None and before.kind == "backward",
                first_in_flight=first_in_flight,
                finished=finished,
                reloading=reloading if forward else None,
                reloads=reloads,
                sent=sent,
                overlapped=before is not None and before.paired,
                pair=self._pair(index, others) if step.paired else None,
            )
            before = step
            if not has_run[number]:
                has_run = (*has_run[:number], True, *has_run[number + 1 :])
            if left[number] is forward:
                left = (*left[:number], not forward, *left[number + 1 :])
            if forward:
                in_flight[number] += 1
                first_in_flight = first_in_flight or (step.microbatch == 0 and number == last)
                forwards.add((step.microbatch, number))
            else:
                finished += number == last
                reloading = reloads
                sent = number, not in_flight[number]

    def _exchanged(self, index: int, held: tuple[Message, ...]) -> tuple[Message, ...]:
        """`send_forward_recv_backward` of 1F1B: the output of the step at this index, and the gradient for the next one."""
        step, after = self.order[index], self.order[index + 1]
        if after.kind == "forward" or self.ends.last[after.chunk] or not self._steady:
            return ()
        output = Message(Kind.OUTPUT, step.microbatch, step.chunk)
        return (*held, output, Message(Kind.OUTPUT_GRADIENT, after.microbatch, after.chunk))

    @cached_property
    def _steady(self) -> bool:
        """Whether forwards run after the first backward."""
        first = next(index for index, step in enumerate(self.order) if step.kind == "backward")
        return any(step.kind == "forward" for step in self.order[first:])

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
    def _last_of_warmup(self) -> Pass | None:
        return None if self._ring is None else last_input_of_warmup(self.order, self._ring)


def _highest(moments: Sequence[Moment], *, first: bool) -> tuple[int, ...]:
    passes: set[tuple[str, int]] = set()
    found: list[int] = []
    groups: dict[tuple[object, ...], dict[tuple[int, ...], int]] = {}
    for index, moment in enumerate(moments):
        step = moment.step
        if first and (step.kind, step.chunk) not in passes:
            passes.add((step.kind, step.chunk))
            found.append(index)
            continue
        chunk = step.chunk
        released = tuple((each.kind, each.chunk) for each in moment.released) if moment.released else ()
        alone = moment.others[chunk] == 0
        group = (step.kind, chunk, alone, moment.left[chunk], released, len(moment.exchanged), moment.after_backward)
        kinds = [each.kind for each in moment.held]
        counts = (*moment.others, *moment.left, *map(kinds.count, _KINDS), moment.waiting, len(passes))
        groups.setdefault(group, {}).setdefault(counts, index)
    for counted in groups.values():
        kept: list[tuple[int, ...]] = []
        for counts in sorted(counted, key=sum, reverse=True):
            if not any(all(map(le, counts, higher)) for higher in kept):
                kept.append(counts)
        found += [counted[counts] for counts in kept]
    return tuple(sorted(found))


@lru_cache(maxsize=1024)
def iteration(
    *,
    pipeline: int,
    pipeline_rank: int,
    microbatches: int,
    group_size: int | None,
    legacy: bool,
    combined: bool,
    overlaps: bool,
    ends: Ends,
) -> Iteration:
    """The iteration of a pipeline rank. Arguments as in `steps`, `Ring` and `Ends`."""
    chunks = len(ends.first)
    order = steps(
        pipeline=pipeline,
        pipeline_rank=pipeline_rank,
        chunks=chunks,
        microbatches=microbatches,
        group_size=group_size,
        legacy=legacy,
        combined=combined,
    )
    ring = Ring(pipeline, group_size or pipeline, overlaps, ends.first[0], ends.last[-1]) if chunks > 1 else None
    return Iteration(order, ends, ring)
