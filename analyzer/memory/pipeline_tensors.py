"""Tensors that a pipeline stage sent or received, and that the schedule references after they were used.

Sources: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local variables, which keep their tensors until they are assigned again; core/transformer/
transformer_block.py set_input_tensor: a chunk keeps the input that it received last, and with it that input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analyzer.layout.stages import Chunk
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob


class Neighbours(NamedTuple):
    """What the steps before and after a step of the same rank say about its messages."""

    after_backward: bool = False
    """A backward has run in this iteration."""
    awaits: bool = False
    """The next step is of the other kind and needs a message, which is received already."""
    sends: bool = False
    """The step before was of the other kind, and its result is being sent."""


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

    def alive_during(self, step: Step, around: Neighbours) -> tuple[Tensor, ...]:
        """What is allocated during `step`."""
        if step.kind == "forward":
            return (*(self.forward if around.after_backward else ()), *(self.gradient_ahead if around.awaits else ()))
        return (
            *(self.backward if around.after_backward else ()),
            *(self.input_ahead if around.awaits else ()),
            *(self.output if around.sends else ()),
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


class PipelineWalk:
    """The tensors of the pipeline schedule beside each step of an iteration, in order.

    `idle` has, for each chunk, what it keeps while none of its microbatches is in flight, once it has run. `warm`: earlier
    iterations have run. Call `bytes_during` for every step, and `end` after every backward.
    """

    def __init__(
        self,
        tensors: PipelineTensors,
        idle: Sequence[tuple[Tensor, ...]],
        chunks: Sequence[Chunk],
        order: Sequence[Step],
        *,
        warm: bool,
    ) -> None:
        self._tensors = tensors
        self._idle = idle
        self._chunks = chunks
        self._order = order
        self._warmed_up = _end_of_warmup(order)
        self._ended: tuple[int, int] | None = None
        """Microbatch and chunk of the backward that ran last."""
        self._over = False
        """Whether the backward of the microbatch at the end of the warm-up has run."""
        self._last = [0 if warm else -1] * len(idle)
        """The microbatch that each chunk ran last; -1 before the first."""
        self._bytes: dict[tuple[str, Neighbours], int] = {}
        self._idle_bytes = [(total_bytes(each), total_bytes(each[1:])) for each in idle]
        self._keeps_inputs = any(whole for whole, _ in self._idle_bytes)
        self._warmup_bytes = (total_bytes(tensors.of_warmup), total_bytes(tensors.of_warmup[1:]))
        self._has_warmup = self._warmed_up is not None and not chunks[self._warmed_up[1]].pre_process

    def bytes_during(self, place: int, step: Step, in_flight: Sequence[int]) -> int:
        """Bytes allocated during the step at this place of the order. `in_flight` counts microbatches of each chunk."""
        if step.kind == "forward" and self._last:
            self._last[step.chunk] = step.microbatch
        around = self._around(place, step)
        key = (step.kind, around)
        if key not in self._bytes:
            self._bytes[key] = total_bytes(self._tensors.alive_during(step, around))
        found = self._bytes[key]
        sent = self._ended if found else None
        if self._keeps_inputs:
            for chunk, (whole, gradient) in enumerate(self._idle_bytes):
                last = self._last[chunk]
                if whole and last >= 0 and not in_flight[chunk]:
                    found += whole - gradient if (last, chunk) == sent else whole
        if self._over and self._has_warmup and not self._is_idle(self._warmed_up, in_flight):
            whole, gradient = self._warmup_bytes
            found += whole - gradient if self._warmed_up == sent else whole
        return found

    def tensors_during(self, place: int, step: Step, in_flight: Sequence[int]) -> tuple[Tensor, ...]:
        """The tensors that `bytes_during` adds up; call it after that, before `end`."""
        around = self._tensors.alive_during(step, self._around(place, step))
        kept = {
            (self._last[chunk], chunk): each
            for chunk, each in enumerate(self._idle)
            if self._last[chunk] >= 0 and not in_flight[chunk]
        }
        if self._over and self._has_warmup and self._warmed_up is not None:
            kept.setdefault(self._warmed_up, self._tensors.of_warmup)
        # the gradient of the input whose backward ran last is the one that was sent
        idle = (each for which, both in kept.items() for each in (both[:1] if which == self._ended and around else both))
        return (*around, *idle)

    def end(self, step: Step) -> None:
        """A backward is over."""
        self._ended = (step.microbatch, step.chunk)
        self._over = self._over or self._ended == self._warmed_up

    def _is_idle(self, which: tuple[int, int] | None, in_flight: Sequence[int]) -> bool:
        """Whether this microbatch is the last one of an idle chunk."""
        if which is None or not self._idle:
            return False
        microbatch, chunk = which
        return self._last[chunk] == microbatch and not in_flight[chunk]

    def _around(self, place: int, step: Step) -> Neighbours:
        """Where all forwards come first, no message is received during a step."""
        after_backward = self._ended is not None
        if self._warmed_up is None:
            return Neighbours(after_backward)
        order = self._order
        following = order[place + 1] if place + 1 < len(order) else None
        awaits = following is not None and following.kind != step.kind
        if step.kind == "forward":
            return Neighbours(after_backward, awaits and following is not None and not self._chunks[following.chunk].post_process)
        previous = order[place - 1] if place else None
        return Neighbours(
            after_backward,
            awaits and following is not None and not self._chunks[following.chunk].pre_process,
            previous is not None and previous.kind == "forward" and not self._chunks[previous.chunk].post_process,
        )


def _end_of_warmup(order: Sequence[Step]) -> tuple[int, int] | None:
    """Microbatch and chunk of the last forward before the first backward; None if no forward comes after that backward."""
    first = next((place for place, step in enumerate(order) if step.kind == "backward"), 0)
    if not any(step.kind == "forward" for step in order[first:]):
        return None
    return order[first - 1].microbatch, order[first - 1].chunk
