"""Messages between pipeline stages that something references, at each step of a schedule.

The assignments of Megatron's schedules are executed. A message is allocated while a variable or a list of the schedule, an
attribute of a chunk, the autograd graph of an output, or a microbatch in flight references it. Microbatches in flight, and the
step that runs, count their own messages: these are left out.

Sources: core/pipeline_parallel/schedules.py `forward_backward_pipelining_without_interleaving` and
`forward_backward_pipelining_with_interleaving` (0.16.1); core/transformer/transformer_block.py `set_input_tensor`: a chunk
references the input that it received last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple

from analyzer.schedule.messages import Ring, last_input_of_warmup
from analyzer.schedule.pipeline import Step

BEFORE: Final = -1
"""The microbatch of a message of the iteration before."""
Pass = tuple[int, int]
"""A microbatch and a chunk."""


class Kind(IntEnum):
    """What a message is for the stage that sends or receives it."""

    INPUT = auto()
    """Of a microbatch whose backward has run."""
    NEXT_INPUT = auto()
    """Of a microbatch whose forward has not run."""
    INPUT_GRADIENT = auto()
    OUTPUT = auto()
    OUTPUT_GRADIENT = auto()


class Message(NamedTuple):
    """A tensor that pipeline stages exchange. A stage without a neighbour on that side has none of its kind."""

    kind: Kind
    microbatch: int
    chunk: int


class Ends(NamedTuple):
    """Which chunks of a rank are at an end of the model."""

    first: tuple[bool, ...]
    """For each chunk, whether it begins with the embedding, and receives no input."""
    last: tuple[bool, ...]
    """For each chunk, whether it computes the loss, and sends no output."""


class References(ABC):
    """The messages that a schedule references. Call `begin` before each step and `end` after it, with its index."""

    def __init__(self, order: Sequence[Step], ends: Ends) -> None:
        self.order = order
        self._ends = ends
        self._input: Pass | None = None
        """`input_tensor`."""
        self._output: Pass | None = None
        """`output_tensor`, whose autograd graph references its input."""
        self._output_has_data = False
        """Whether the output is not freed yet (`deallocate_output_tensor`)."""
        self._output_gradient: Pass | None = None
        """`output_tensor_grad`."""
        self._input_gradient: Pass | None = None
        """`input_tensor_grad`."""
        self._received_inputs: list[Pass] = []
        """The elements of `input_tensors` that are not used yet."""
        self._received_gradients: list[Pass] = []
        """The elements of `output_tensor_grads` that are not used yet."""
        self._attributes: dict[int, int] = {}
        """For each chunk without microbatches in flight, the microbatch of the input that it references."""
        self.in_flight: dict[int, list[int]] = {chunk: [] for chunk in range(len(ends.first))}
        """For each chunk, the microbatches whose forward has begun, and whose backward has not ended."""
        self._finished: set[Pass] = set()
        """Microbatches and chunks whose backward has run."""
        self._following = _following(order)
        self._warmup = next((index for index, step in enumerate(order) if step.kind == "backward"), len(order))
        """The number of steps before the first backward."""
        self._steady = any(step.kind == "forward" for step in order[self._warmup :])
        """Whether forwards run after the first backward."""

    def begin(self, index: int) -> tuple[Message, ...]:
        """Starts a step. Returns messages that only modules of its chunk reference, until they run again in this forward."""
        step = self.order[index]
        released: tuple[Message, ...] = ()
        if step.kind == "forward":
            last = self._attributes.get(step.chunk, None)
            if last is not None:
                before = self.held(step)
                del self._attributes[step.chunk]
                after = self.held(step)
                released = tuple(each for each in before if each not in after)
            self.in_flight[step.chunk].append(step.microbatch)
        self._begin(step)
        return released

    def end(self, index: int) -> None:
        """Ends a step."""
        step = self.order[index]
        if step.kind == "backward":
            self.in_flight[step.chunk].remove(step.microbatch)
            self._finished.add((step.microbatch, step.chunk))
            self._input_gradient = (step.microbatch, step.chunk)
        self._end(index, step)

    @abstractmethod
    def _begin(self, step: Step) -> None: ...

    @abstractmethod
    def _end(self, index: int, step: Step) -> None: ...

    def held(self, step: Step) -> tuple[Message, ...]:
        """The messages that are allocated during or after a step, and that no microbatch in flight and not the step counts."""
        first, last = self._ends
        found: list[Message] = []
        inputs = {self._input, self._output, *self._received_inputs}
        if self._attributes:
            inputs.update((microbatch, chunk) for chunk, microbatch in self._attributes.items())
        gradients = {self._input_gradient}
        for which in inputs:
            if which is None or first[which[1]] or which[0] in self.in_flight[which[1]]:
                continue
            if which[0] == BEFORE or which in self._finished:
                found.append(Message(Kind.INPUT, *which))
                gradients.add(which)
            else:
                found.append(Message(Kind.NEXT_INPUT, *which))
        for which in gradients:
            if which is not None and not first[which[1]]:
                found.append(Message(Kind.INPUT_GRADIENT, *which))
        if self._output_has_data and self._output is not None and not last[self._output[1]]:
            found.append(Message(Kind.OUTPUT, *self._output))
        for which in {self._output_gradient, *self._received_gradients}:
            if which is not None and not last[which[1]] and not self._runs(step, which):
                found.append(Message(Kind.OUTPUT_GRADIENT, *which))
        return tuple(found)

    def _runs(self, step: Step, which: Pass) -> bool:
        """Whether a step is the backward of a microbatch, and has not ended."""
        return step.kind == "backward" and (step.microbatch, step.chunk) == which and which[0] in self.in_flight[which[1]]

    def _next_is(self, index: int, kind: str) -> bool:
        return index + 1 < len(self.order) and self.order[index + 1].kind == kind


class WithoutInterleaving(References):
    """The references of 1F1B, whose variables of a backward are elements of lists."""

    def _begin(self, step: Step) -> None:
        if step.kind == "backward":
            which = (step.microbatch, step.chunk)
            self._input = self._output = self._output_gradient = which
            self._output_has_data = False

    def _end(self, index: int, step: Step) -> None:
        if step.kind == "forward" and self._next_is(index, "backward"):
            self._output, self._output_has_data = (step.microbatch, step.chunk), False
        elif step.kind == "backward" and self._next_is(index, "forward"):
            self._input = (self.order[index + 1].microbatch, step.chunk)


class Interleaved(References):
    """The references of the interleaved schedule, which receives a message one pass before it is used."""

    def __init__(self, order: Sequence[Step], ends: Ends, ring: Ring, *, warm: bool) -> None:
        """`warm`: an iteration has run before."""
        super().__init__(order, ends)
        self._ring = ring
        self._last_of_warmup = self._warmup - (2 if self._steady else 1)
        if warm:
            self._attributes = dict.fromkeys(range(len(ends.first)), BEFORE)

    def _begin(self, step: Step) -> None:
        used = (step.microbatch, step.chunk)
        if step.kind == "forward":
            self._output_has_data = False
            self._received_inputs = [each for each in self._received_inputs if each != used]
        else:
            self._received_gradients = [each for each in self._received_gradients if each != used]

    def _end(self, index: int, step: Step) -> None:
        if step.kind == "forward":
            self._end_forward(index, step)
            return
        if not self.in_flight[step.chunk]:
            self._attributes[step.chunk] = step.microbatch
        if index > self._last_of_warmup and self.order[index - 1].kind == "forward" and self._steady and not self._ring.overlaps:
            self._output_has_data, self._input = False, None
            if self._next_is(index, "forward"):
                self._input = self._receive_input(index)
        if self._following[index][0] is None:  # the end of the steady state
            self._output_has_data = False
        gradient = self._receive_gradient(index)
        if gradient is not None and (not self._ring.overlaps or self._next_is(index, "backward")):
            self._output_gradient = gradient

    def _end_forward(self, index: int, step: Step) -> None:
        self._output = None if self._ends.last[step.chunk] else (step.microbatch, step.chunk)
        self._output_has_data = index > self._last_of_warmup
        if index < self._last_of_warmup:
            self._input = self._receive_input(index) or self._input
        elif index == self._last_of_warmup:
            self._receive_input(index)
            if self._steady:
                # the first stage can receive an input of a later step than the next, or none
                self._input = last_input_of_warmup(self.order, self._ring)
                gradient = self._receive_gradient(index)
                if gradient is not None and not self._ring.overlaps:
                    self._output_gradient = gradient
        elif self._ring.overlaps:
            self._receive_input(index)

    def _receive_input(self, index: int) -> Pass | None:
        following = self._following[index][0]
        if following is not None:
            self._received_inputs.append(following)
        return following

    def _receive_gradient(self, index: int) -> Pass | None:
        following = self._following[index][1]
        if following is not None:
            self._received_gradients.append(following)
        return following


def _following(order: Sequence[Step]) -> list[tuple[Pass | None, Pass | None]]:
    """For each step, the first forward and the first backward after it."""
    found: list[tuple[Pass | None, Pass | None]] = []
    forward: Pass | None = None
    backward: Pass | None = None
    for step in reversed(order):
        found.append((forward, backward))
        if step.kind == "forward":
            forward = (step.microbatch, step.chunk)
        else:
            backward = (step.microbatch, step.chunk)
    return found[::-1]


def references(order: Sequence[Step], ends: Ends, ring: Ring | None, *, warm: bool) -> References:
    """The references of 1F1B, or of the interleaved schedule if there is a ring. `warm`: an iteration has run before."""
    return WithoutInterleaving(order, ends) if ring is None else Interleaved(order, ends, ring, warm=warm)
