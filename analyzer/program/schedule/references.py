"""Messages between pipeline stages that something references during a step of a schedule.

A message is allocated while a variable or a list of the schedule, an attribute of a chunk, the autograd graph of an output, or a
microbatch in flight references it. Microbatches in flight, and the step that runs, count their own messages: these are left out.
A message that two references have in common exists once.

Sources: core/pipeline_parallel/schedules.py `forward_backward_pipelining_without_interleaving` and
`forward_backward_pipelining_with_interleaving` (0.16.1); core/transformer/transformer_block.py `set_input_tensor`: a chunk
references the input that it received last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple

from analyzer.program.schedule.pipeline import Step

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
    leaf: bool = False
    """Whether the input of the first layer of the model is a leaf of autograd that gets a gradient. Then the autograd graph of an
    output references it and its gradient, as the input that another stage receives."""

    def exists(self, message: Message, *, forward: bool) -> bool:
        """Whether the stage has a neighbour that sends or receives the message, or the first stage references it in this step."""
        if message.kind >= Kind.OUTPUT:
            return not self.last[message.chunk]
        return not self.first[message.chunk] or (self.leaf and forward and message.kind is not Kind.NEXT_INPUT)


class Around(NamedTuple):
    """A step, and what has run around it."""

    step: Step
    forwards: Sequence[int]
    """For each chunk, the number of forwards that have begun. Microbatches run in the order of their numbers."""
    backwards: Sequence[int]
    """For each chunk, the number of backwards that have ended."""
    output: Pass | None
    """The microbatch whose forward ran last, if its output is sent: `output_tensor` of the interleaved schedule."""
    last_backward: Pass | None
    next_forward: Pass | None
    next_backward: Pass | None
    after_forward: bool
    """Whether the step before is a forward."""
    before_backward: bool
    """Whether the step after is a backward."""

    def input_of(self, which: Pass) -> Iterator[Message]:
        """The input of a microbatch that something references, and its attribute `grad`; nothing while it is in flight."""
        microbatch, chunk = which
        if microbatch < self.backwards[chunk]:
            yield Message(Kind.INPUT, microbatch, chunk)
            yield Message(Kind.INPUT_GRADIENT, microbatch, chunk)
        elif microbatch >= self.forwards[chunk]:
            yield Message(Kind.NEXT_INPUT, microbatch, chunk)

    def is_of_idle(self, message: Message) -> bool:
        """Whether it is what a chunk references that has no microbatch in flight (`of_idle`)."""
        finished = self.backwards[message.chunk]
        return finished == self.forwards[message.chunk] and message in of_idle(message.chunk, finished)


def without_interleaving(around: Around) -> Iterator[Message]:
    """The messages in 1F1B. The variables of a backward refer to its own messages; afterwards these belong to a microbatch before.

    `input_tensor_grad` is the gradient that the last backward has computed. In the next forward `output_tensor_grad` still is the
    gradient that it has received, and the autograd graph of `output_tensor` references its input.
    """
    if around.last_backward is None:
        return
    yield Message(Kind.INPUT_GRADIENT, *around.last_backward)
    if around.step.kind == "forward":
        yield Message(Kind.OUTPUT_GRADIENT, *around.last_backward)
        yield from around.input_of(around.last_backward)


def interleaved(around: Around, *, steady: bool, overlaps: bool, last_of_warmup: Pass | None) -> Iterator[Message]:
    """The messages in the interleaved schedule, which receives a message one pass before it is used.

    `steady`: the warm-up has ended, and forwards run after it. `overlaps`: an input is received while the backward before its
    forward runs. `last_of_warmup`: the input that was received last in the warm-up. If messages overlap, `input_tensor` refers to
    it until the end of the iteration. What idle chunks reference is left out.
    """
    forward = around.step.kind == "forward"
    if around.last_backward is not None:
        yield Message(Kind.INPUT_GRADIENT, *around.last_backward)
    if around.output is not None:
        yield from around.input_of(around.output)  # by its autograd graph
        if steady and not forward and (around.after_forward or (overlaps and around.next_forward is not None)):
            yield Message(Kind.OUTPUT, *around.output)
    if steady and forward and around.next_backward is not None:
        yield Message(Kind.OUTPUT_GRADIENT, *around.next_backward)
    if steady and not forward and overlaps and around.next_forward is not None:
        yield Message(Kind.NEXT_INPUT, *around.next_forward)
    if steady and overlaps and last_of_warmup is not None:
        yield from around.input_of(last_of_warmup)


def of_idle(chunk: int, finished: int) -> tuple[Message, Message]:
    """What an idle chunk references after `finished` backwards: the input that it received last, and the gradient of it."""
    number = finished - 1 if finished else BEFORE
    return Message(Kind.INPUT, number, chunk), Message(Kind.INPUT_GRADIENT, number, chunk)
