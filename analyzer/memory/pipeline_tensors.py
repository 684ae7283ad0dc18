"""Tensors that a pipeline stage sent or received, and that the schedule references after they were used.

Sources: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local variables, which keep their tensors until they are assigned again; core/transformer/
transformer_block.py set_input_tensor: a chunk keeps the input that it received last, and with it that input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from analyzer.layout.stages import Chunk
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob


class Situation(NamedTuple):
    """What surrounds a step of a rank."""

    backward: bool = False
    """The step is a backward."""
    awaits: bool = False
    """The next step is of the other kind and needs a message, which is received already."""
    sends: bool = False
    """A backward: the step before was a forward, and its result is being sent."""
    after_backward: bool = False
    """A backward has run in this iteration."""


@dataclass(frozen=True)
class PipelineTensors:
    """Tensors of the pipeline schedule that are allocated while a step of this rank runs."""

    forward: tuple[Tensor, ...] = ()
    """During a forward, once a first backward has run."""
    backward: tuple[Tensor, ...] = ()
    """During a backward, once a first backward has run."""
    gradient_ahead: tuple[Tensor, ...] = ()
    """During a forward, if the next backward waits for a message."""
    input_ahead: tuple[Tensor, ...] = ()
    """During a backward, if the next forward waits for a message."""
    output: tuple[Tensor, ...] = ()
    """During a backward, if the forward before it sends its output."""
    of_warmup: tuple[Tensor, ...] = ()
    """Of the microbatch whose input came last before the first backward, once its own backward has run."""

    def alive_during(self, situation: Situation) -> tuple[Tensor, ...]:
        """What is allocated during a step."""
        if not situation.backward:
            return (
                *(self.forward if situation.after_backward else ()),
                *(self.gradient_ahead if situation.awaits else ()),
            )
        return (
            *(self.backward if situation.after_backward else ()),
            *(self.input_ahead if situation.awaits else ()),
            *(self.output if situation.sends else ()),
        )


def pipeline_tensors(job: TrainingJob, *, pipeline_rank: int) -> PipelineTensors:
    """The tensors of one pipeline rank.

    1F1B: the gradient that was sent to the previous stage stays until the next one is computed, the one that was received from
    the next stage until the next is received, after a forward. During that forward `output_tensor` still references the old
    output, and through its autograd graph the input that it was computed from.
    """
    parallel = job.parallel
    shapes = shapes_of(job)
    if parallel.virtual_pipeline is not None:
        return _interleaved(job)
    first = pipeline_rank == 0
    sent = () if first else (shapes.hidden("gradient sent to the previous stage"),)
    old = () if first else (shapes.hidden("input of the previous microbatch"),)
    received = (received_gradient(job),) if pipeline_rank < parallel.pipeline - 1 else ()
    return PipelineTensors(forward=(*sent, *old, *received), backward=sent)


def received_gradient(job: TrainingJob) -> Tensor:
    """[s, b, h]: the gradient from the next stage, which a local variable of the schedule references during the backward."""
    return shapes_of(job).hidden("gradient received from the next stage")


def _interleaved(job: TrainingJob) -> PipelineTensors:
    """Every rank sends and receives, since the stages form a ring; a message is received one step ahead.

    `forward_backward_pipelining_with_interleaving`: after a forward the input of the next forward is received, during the
    backward in between if messages overlap; after a backward the gradient of the next one. An output that was sent is freed
    before the next forward. `input_tensor_grad` references the gradient that was sent last, and if messages overlap
    `input_tensor` the last input of the warm-up until the iteration ends.
    """
    shapes = shapes_of(job)
    sent = (shapes.hidden("gradient sent to the previous stage"),)
    ahead = (shapes.hidden("gradient received ahead"),)
    output = (shapes.hidden("output of the previous forward"),)
    if not job.parallel.overlap_p2p:
        return PipelineTensors(forward=sent, backward=sent, gradient_ahead=ahead, output=output)
    return PipelineTensors(
        forward=sent,
        backward=sent,
        gradient_ahead=ahead,
        output=output,
        input_ahead=(shapes.hidden("input received ahead"),),
        of_warmup=(shapes.hidden("last input of the warm-up"), shapes.hidden("its gradient")),
    )


def kept_inputs(job: TrainingJob, chunks: Sequence[Chunk]) -> tuple[tuple[Tensor, ...], ...]:
    """The last input of each chunk that receives one, and its gradient, until its next forward."""
    shapes = shapes_of(job)
    both = (shapes.hidden("last input of an idle chunk"), shapes.hidden("its gradient"))
    return tuple(() if chunk.pre_process else both for chunk in chunks)


class MessageOrder:
    """The steps of an iteration with the messages around each of them."""

    def __init__(self, order: Sequence[Step], chunks: Sequence[Chunk]) -> None:
        self.order = order
        self.warmed_up = _end_of_warmup(order)
        """Microbatch and chunk of the last forward before the first backward; None if no forward comes after that backward."""
        self.receives_input = self.warmed_up is not None and not chunks[self.warmed_up[1]].pre_process
        """Whether that forward got its input from another stage."""
        self.situations = tuple(self._situations(chunks))
        """For each step."""

    def _situations(self, chunks: Sequence[Chunk]) -> Iterator[Situation]:
        """Where all forwards come first, no message is received during a step."""
        after = False
        first, last = [chunk.pre_process for chunk in chunks], [chunk.post_process for chunk in chunks]
        waits = self.warmed_up is not None
        previous: Step | None = None
        for step, following in zip(self.order, (*self.order[1:], None), strict=True):
            turns = waits and following is not None and following.kind != step.kind
            if step.kind == "forward":
                yield _SITUATIONS[False, turns and following is not None and not last[following.chunk], False, after]
            else:
                awaits = turns and following is not None and not first[following.chunk]
                sends = waits and previous is not None and previous.kind == "forward" and not last[previous.chunk]
                yield _SITUATIONS[True, awaits, sends, after]
                after = True
            previous = step


_SITUATIONS: Final = {flags: Situation(*flags) for flags in product((False, True), repeat=4)}


class PipelineWalk:
    """The tensors of the pipeline schedule beside each step of an iteration, in order.

    `idle` has, for each chunk, what it keeps while none of its microbatches is in flight, once it has run. `warm`: earlier
    iterations have run. Call `begin` before every step, and `end` after it.
    """

    def __init__(self, tensors: PipelineTensors, idle: Sequence[tuple[Tensor, ...]], messages: MessageOrder, *, warm: bool) -> None:
        self._tensors = tensors
        self._idle = idle
        self._messages = messages
        self._situations = messages.situations
        self._warmed_up = messages.warmed_up
        self._bytes: dict[Situation, int] = {}
        self._ended: tuple[int, int] | None = None
        """Microbatch and chunk of the backward that ran last."""
        self._over = False
        """Whether the backward of the microbatch at the end of the warm-up has run, and it received its input."""
        self._in_flight = [0] * len(idle)
        self._last = [0 if warm else -1] * len(idle)
        """The microbatch that each chunk ran last; -1 before the first."""
        self._idle_bytes = [total_bytes(each) for each in idle]
        self._idle_total = sum(self._idle_bytes) if warm else 0
        """Bytes that idle chunks keep."""
        self._idle_gradients = [total_bytes(each[1:]) for each in idle]
        self._warmup_bytes = (total_bytes(tensors.of_warmup), total_bytes(tensors.of_warmup[1:]))
        self._keeps = any(self._idle_bytes)

    def begin(self, place: int, step: Step) -> int:
        """Bytes allocated during the step at this place of the order."""
        situation = self._situations[place]
        found = self._bytes.get(situation)
        if found is None:
            found = self._bytes[situation] = total_bytes(self._tensors.alive_during(situation))
        if not self._keeps:
            return found
        if step.kind == "forward":
            chunk = step.chunk
            if not self._in_flight[chunk] and self._last[chunk] >= 0:
                self._idle_total -= self._idle_bytes[chunk]
            self._in_flight[chunk] += 1
            self._last[chunk] = step.microbatch
        return found + self._idle_total + self._exceptions(found > 0)

    def end(self, step: Step) -> None:
        """A step is over."""
        if step.kind == "forward":
            return
        self._ended = (step.microbatch, step.chunk)
        if self._keeps:
            self._over = self._over or (self._ended == self._warmed_up and self._messages.receives_input)
            self._in_flight[step.chunk] -= 1
            if not self._in_flight[step.chunk]:
                self._idle_total += self._idle_bytes[step.chunk]

    def tensors(self, place: int) -> tuple[Tensor, ...]:
        """The tensors during the step at this place; call it between `begin` and `end`."""
        around = self._tensors.alive_during(self._situations[place])
        kept = {
            (self._last[chunk], chunk): each
            for chunk, each in enumerate(self._idle)
            if each and self._last[chunk] >= 0 and not self._in_flight[chunk]
        }
        if self._over and self._warmed_up is not None:
            kept.setdefault(self._warmed_up, self._tensors.of_warmup)
        # the gradient of the input whose backward ran last is the one that was sent
        idle = (each for which, both in kept.items() for each in (both[:1] if which == self._ended and around else both))
        return (*around, *idle)

    def _exceptions(self, sent: bool) -> int:
        """Bytes to add to those of idle chunks: the last input of the warm-up, less a gradient that is counted as sent."""
        ended = self._ended if sent else None
        found = 0
        if ended is not None and self._is_idle(ended):
            found -= self._idle_gradients[ended[1]]
        if self._over and self._warmed_up is not None and not self._is_idle(self._warmed_up):
            whole, gradient = self._warmup_bytes
            found += whole - gradient if self._warmed_up == ended else whole
        return found

    def _is_idle(self, which: tuple[int, int]) -> bool:
        """Whether this microbatch is the last one of an idle chunk that keeps its input."""
        microbatch, chunk = which
        return self._last[chunk] == microbatch and not self._in_flight[chunk] and self._idle_bytes[chunk] > 0


def _end_of_warmup(order: Sequence[Step]) -> tuple[int, int] | None:
    first = next((place for place, step in enumerate(order) if step.kind == "backward"), 0)
    if not any(step.kind == "forward" for step in order[first:]):
        return None
    return order[first - 1].microbatch, order[first - 1].chunk
