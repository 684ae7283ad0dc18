"""Pipeline send and receive tensors that the schedule keeps referenced after their use.

Sources: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local variables that reference their tensors until the next assignment; core/transformer/
transformer_block.py set_input_tensor: a chunk references the input that it received last, and so the gradient of this input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from analyzer.layout.stages import Chunk, mtp_stage
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.schedule.messages import Ring, last_input_of_warmup, waiting_messages
from analyzer.schedule.pipeline import Pair, Step
from analyzer.specs import ParallelSpec, TrainingJob

SENT: Final = "gradient sent to the previous stage"
PREVIOUS: Final = "input of the previous microbatch"


class Situation(NamedTuple):
    """The messages and steps current one step of a rank."""

    backward: bool = False
    """The step is a backward."""
    awaits: bool = False
    """The next step is of the other kind and needs a message, which is received during this step."""
    sends: bool = False
    """The step is a backward, and the output of the preceding forward is being sent."""
    after_backward: bool = False
    """A backward has already run in this iteration."""
    after_first: bool = False
    """The step is a forward, and only one backward has run."""


@dataclass(frozen=True)
class PipelineTensors:
    """Tensors of the pipeline schedule that are allocated while a step of this rank runs."""

    forward: tuple[Tensor, ...] = ()
    """During a forward, after the first backward of the iteration."""
    forward_after_first: tuple[Tensor, ...] = ()
    """During a forward, between the first backward and the second one. In addition to `forward`."""
    backward: tuple[Tensor, ...] = ()
    """During a backward, after the first backward of the iteration."""
    gradient_ahead: tuple[Tensor, ...] = ()
    """During a forward, if the next step is a backward that needs a message."""
    input_ahead: tuple[Tensor, ...] = ()
    """During a backward, if the next step is a forward that needs a message."""
    output: tuple[Tensor, ...] = ()
    """During a backward, if the preceding forward sends its output."""
    last_of_warmup: tuple[Tensor, ...] = ()
    """The last input received in the warm-up and its gradient, after the backward of that microbatch."""
    waiting: tuple[Tensor, ...] = ()
    """A message that waits for a later step than the next."""
    exchanged: tuple[Tensor, ...] = ()
    """After a forward whose next step is a backward: its output, and the gradient that is received."""

    def alive_during(self, situation: Situation) -> tuple[Tensor, ...]:
        """The tensors that are allocated during a step."""
        if not situation.backward:
            return (
                *(self.forward if situation.after_backward else ()),
                *(self.forward_after_first if situation.after_first else ()),
                *(self.gradient_ahead if situation.awaits else ()),
            )
        return (
            *(self.backward if situation.after_backward else ()),
            *(self.input_ahead if situation.awaits else ()),
            *(self.output if situation.sends else ()),
        )


def pipeline_tensors(job: TrainingJob, *, pipeline_rank: int, freed: bool = False, first_stays: bool = False) -> PipelineTensors:
    """The tensors of one pipeline rank.

    `freed`: activation offloading frees the input of every chunk in its forward. `first_stays`: but not for the first microbatch.

    In 1F1B, the gradient sent to the previous stage stays allocated until the next one is computed. The gradient received from the
    next stage stays allocated until the next one is received, which is after a forward. During that forward `output_tensor` still
    references the previous output and, through its autograd graph, the previous input. The output of a forward is freed after
    `send_forward_recv_backward` has received the gradient.
    """
    parallel = job.parallel
    if parallel.virtual_pipeline is not None:
        return _interleaved(job, freed=freed)
    first = pipeline_rank == 0
    sent = () if first else (_message(job, SENT, sender=pipeline_rank - 1),)
    old = () if first else (_message(job, PREVIOUS, sender=pipeline_rank - 1),)
    received = (received_gradient(job, sender=pipeline_rank),) if pipeline_rank < parallel.pipeline - 1 else ()
    output = tuple(replace(each, name="output sent to the next stage") for each in received)
    exchanged = (*output, *(replace(each, name="next gradient from the next stage") for each in received))
    tensors = PipelineTensors(forward=(*sent, *old, *received), backward=sent, exchanged=exchanged)
    if freed:
        return replace(tensors, forward=(*sent, *received), forward_after_first=old if first_stays else ())
    return tensors


def received_gradient(job: TrainingJob, *, sender: int = 0) -> Tensor:
    """[s, b, h]: the gradient from the stage after `sender`. The schedule references it during the backward of `sender`."""
    return _message(job, "gradient received from the next stage", sender=sender)


def _message(job: TrainingJob, name: str, *, sender: int) -> Tensor:
    """The output of stage `sender` or its gradient. From the stage with MTP layers on, it has the hidden states of all depths."""
    one = shapes_of(job).hidden(name)
    depths = job.model.mtp_num_layers
    if not depths or job.parallel.virtual_pipeline is not None or sender < mtp_stage(job.parallel):
        return one
    return replace(one, shape=((1 + depths) * one.shape[0], *one.shape[1:]), formula=f"(1+D)·{one.formula}")


def _interleaved(job: TrainingJob, *, freed: bool) -> PipelineTensors:
    """The tensors of the interleaved schedule. Every rank sends and receives, because the stages form a ring.

    Source: `forward_backward_pipelining_with_interleaving`. A message is received one step before it is used: the input of the
    next forward after a forward (during the backward in between if communication overlaps), and the gradient of the next
    backward after a backward. An output is freed before the next forward. `input_tensor_grad` references the gradient that was
    sent last. If communication overlaps, `input_tensor` references the last input of the warm-up until the end of the iteration.
    """
    shapes = shapes_of(job)
    sent = (shapes.hidden(SENT),)
    ahead = (shapes.hidden("gradient received ahead"),)
    output = (shapes.hidden("output of the previous forward"),)
    waiting = (shapes.hidden("messages of later steps"),)
    if not job.parallel.overlap_p2p:
        return PipelineTensors(forward=sent, backward=sent, gradient_ahead=ahead, output=output, waiting=waiting)
    return PipelineTensors(
        waiting=waiting,
        forward=sent,
        backward=sent,
        gradient_ahead=ahead,
        output=output,
        input_ahead=(shapes.hidden("input received ahead"),),
        last_of_warmup=(
            _unless(freed, shapes.hidden("last input of the warm-up")),
            shapes.hidden("gradient of the last input"),
        ),
    )


def kept_inputs(
    job: TrainingJob, chunks: Sequence[Chunk], *, pipeline_rank: int, freed: Sequence[bool] | None = None
) -> tuple[tuple[Tensor, ...], ...]:
    """For each chunk, the input that it received last and the gradient of this input, which are referenced until its next forward.

    Empty for a chunk that receives no input. `freed`: for each chunk, whether activation offloading frees its input in its forward.
    """
    names = ("last input of an idle chunk", "gradient of the last input")
    received, gradient = (_message(job, name, sender=pipeline_rank - 1) for name in names)
    gone = freed or (False,) * len(chunks)
    return tuple(() if chunk.pre_process else (_unless(each, received), gradient) for chunk, each in zip(chunks, gone, strict=True))


def _unless(freed: bool, tensor: Tensor) -> Tensor:
    """The tensor, without data if its storage is freed."""
    return replace(tensor, shape=(0,)) if freed else tensor


class MessageOrder:
    """The steps of an iteration, with the situation of each step."""

    def __init__(self, order: Sequence[Step], chunks: Sequence[Chunk], parallel: ParallelSpec) -> None:
        self.order = order
        self._waits = _has_steady_steps(order)
        """Whether forwards run after the first backward."""
        self.warmed_up: tuple[int, int] | None = None
        """Microbatch and chunk of the last input that is received in the warm-up of the interleaved schedule."""
        self.waiting: tuple[int, ...] = ()
        """For each step, messages of later steps than the next, if there are any."""
        if len(chunks) > 1:
            group = parallel.microbatch_group_size or parallel.pipeline
            ring = Ring(parallel.pipeline, group, parallel.overlap_p2p, chunks[0].pre_process, chunks[-1].post_process)
            self.warmed_up = last_input_of_warmup(order, ring) if self._waits else None
            self.waiting = waiting_messages(order, ring) if group != parallel.pipeline else ()
        self.first = [chunk.pre_process for chunk in chunks]
        """For each chunk, whether it begins with the embedding, and sends no gradient."""
        self._overlaps_messages = parallel.overlap_p2p
        self._last = [chunk.post_process for chunk in chunks]
        self.situations = tuple(self._situations(chunks))
        """For each step."""

    def pair(self, index: int, in_flight: Mapping[int, int] | Sequence[int]) -> Pair:
        """The overlapped step at this index. `in_flight`: for each chunk, the microbatches in flight before this step."""
        step, backward = self.order[index : index + 2]
        following = self.order[index + 2 : index + 3]
        later = self.order[index + 2 : index + 4] if following and following[0].paired else following
        received = [self._last[each.chunk] if each.kind == "backward" else self.first[each.chunk] for each in later]
        before = self.order[max(0, index - 1)]
        sends = self._overlaps_messages and before.kind == "backward" and not self.first[before.chunk]
        before_it = (each for each in self.order[:index] if each.kind == "forward" and each.chunk == step.chunk)
        last = None if in_flight[step.chunk] else max((each.microbatch for each in before_it), default=None)
        return Pair(
            step.chunk,
            backward.chunk,
            newest=in_flight[backward.chunk] == 1,
            ahead=received.count(False),
            sent=sends and in_flight[before.chunk] > 0,
            idle=last is not None,
            unused=last is not None and self.warmed_up == (last, step.chunk),
        )

    def _situations(self, chunks: Sequence[Chunk]) -> Iterator[Situation]:
        """If all forwards run before the first backward, no message is received during a step."""
        backwards = 0
        first, last = [chunk.pre_process for chunk in chunks], [chunk.post_process for chunk in chunks]
        waits = self._waits
        previous: Step | None = None
        for step, following in zip(self.order, (*self.order[1:], None), strict=True):
            changes = waits and following is not None and following.kind != step.kind
            if step.kind == "forward":
                yield _SITUATIONS[
                    False, changes and following is not None and not last[following.chunk], False, backwards > 0, backwards == 1
                ]
            else:
                awaits = changes and following is not None and not first[following.chunk]
                sends = waits and previous is not None and previous.kind == "forward" and not last[previous.chunk]
                yield _SITUATIONS[True, awaits, sends, backwards > 0, False]
                backwards += 1
            previous = step


_SITUATIONS: Final = {flags: Situation(*flags) for flags in product((False, True), repeat=5)}


class PipelineWalk:
    """A walk over the steps of an iteration that gives the tensors of the pipeline schedule during each step.

    `idle` lists, for each chunk, the tensors that it references while none of its microbatches is in flight, after its first
    forward. `warm`: earlier iterations have run. Call `begin` before every step, and `end` after it.
    """

    def __init__(self, tensors: PipelineTensors, idle: Sequence[tuple[Tensor, ...]], messages: MessageOrder, *, warm: bool) -> None:
        self._tensors = tensors
        self._idle = idle
        self._situations = messages.situations
        self._warmed_up = messages.warmed_up
        self._first = messages.first
        self._waiting = messages.waiting
        self._waiting_bytes = total_bytes(tensors.waiting)
        self._bytes: dict[Situation, int] = {}
        self._ended: tuple[int, int] | None = None
        """Microbatch and chunk of the backward that ran last."""
        self._warmup_input_unused = False
        """Whether the last microbatch of the warm-up received its input, and its backward has run."""
        self._in_flight = [0] * len(idle)
        self._last = [0 if warm else -1] * len(idle)
        """The microbatch that each chunk ran last; -1 before the first."""
        self._idle_bytes = [total_bytes(each) for each in idle]
        self._idle_total = sum(self._idle_bytes) if warm else 0
        """Bytes that idle chunks reference."""
        self._idle_gradients = [total_bytes(each[1:]) for each in idle]
        self._warmup_bytes = (total_bytes(tensors.last_of_warmup), total_bytes(tensors.last_of_warmup[1:]))
        self._has_idle_tensors = any(self._idle_bytes)
        self.released: tuple[Tensor, ...] = ()
        """Not counted in a forward of a chunk that was idle: its last input and the gradient of it. Dispatchers of MoE layers have
        attributes with autograd graphs, which reference this input until the last dispatch of the forward."""

    def first_needed(self, index: int) -> int:
        """The first step on which the tensors at this index depend: if chunks keep no inputs, the last backward before it."""
        if self._has_idle_tensors:
            return 0
        return next((place for place in range(index - 1, 0, -1) if self._situations[place].backward), 0)

    def begin(self, index: int, step: Step) -> int:
        """Starts the step at this index of the order, and returns the bytes that are allocated during it."""
        situation = self._situations[index]
        found = self._bytes.get(situation)
        if found is None:
            found = self._bytes[situation] = total_bytes(self._tensors.alive_during(situation))
        waiting = self._waiting[index] * self._waiting_bytes if self._waiting else 0
        if self._sends_nothing():
            waiting -= sum(tensor.bytes for tensor in self._tensors.alive_during(situation) if tensor.name == SENT)
        if not self._has_idle_tensors:
            return found + waiting
        if step.kind == "forward":
            chunk = step.chunk
            self.released = ()
            if not self._in_flight[chunk] and self._last[chunk] >= 0:
                self._idle_total -= self._idle_bytes[chunk]
                self.released = self._released(chunk, sent=found > 0)
            self._in_flight[chunk] += 1
            self._last[chunk] = step.microbatch
        return found + waiting + self._idle_total + self._idle_correction(found > 0)

    def end(self, step: Step) -> None:
        """Ends a step."""
        if step.kind == "forward":
            return
        self._ended = (step.microbatch, step.chunk)
        if self._has_idle_tensors:
            self._warmup_input_unused = self._warmup_input_unused or self._ended == self._warmed_up
            self._in_flight[step.chunk] -= 1
            if not self._in_flight[step.chunk]:
                self._idle_total += self._idle_bytes[step.chunk]

    def tensors(self, index: int) -> tuple[Tensor, ...]:
        """The tensors that are allocated during the step at this index. Call it between `begin` and `end`."""
        current = self._tensors.alive_during(self._situations[index])
        if self._sends_nothing():
            current = tuple(tensor for tensor in current if tensor.name != SENT)
        waiting = self._tensors.waiting * (self._waiting[index] if self._waiting else 0)
        kept = {
            (self._last[chunk], chunk): each
            for chunk, each in enumerate(self._idle)
            if each and self._last[chunk] >= 0 and not self._in_flight[chunk]
        }
        if self._warmup_input_unused and self._warmed_up is not None:
            kept.setdefault(self._warmed_up, self._tensors.last_of_warmup)
        idle = (each for which, both in kept.items() for each in self._not_sent(which, both, sent=bool(current)))
        return (*current, *waiting, *idle)

    def finished_inputs(self, index: int, chunk: int, *, microbatches: int) -> int:
        """Bytes allocated during this step for inputs of a chunk, and their gradients, of its first microbatches.

        The backward of these microbatches has finished. Call it between `begin` and `end`.
        """
        ended = self._ended is not None and self._ended[1] == chunk and self._ended[0] < microbatches
        current = self._tensors.alive_during(self._situations[index])
        found = sum(each.bytes for each in current if each.name in (SENT, PREVIOUS)) if ended else 0
        counted = {(self._last[chunk], chunk): self._idle[chunk]} if self._is_idle((self._last[chunk], chunk)) else {}
        if self._warmup_input_unused and self._warmed_up is not None and self._warmed_up[1] == chunk:
            counted.setdefault(self._warmed_up, self._tensors.last_of_warmup)
        finished = {which: each for which, each in counted.items() if which[0] < microbatches}
        return found + sum(total_bytes(self._not_sent(which, both, sent=bool(current))) for which, both in finished.items())

    def _released(self, chunk: int, *, sent: bool) -> tuple[Tensor, ...]:
        which = (self._last[chunk], chunk)
        if self._warmup_input_unused and which == self._warmed_up:  # the schedule still references it
            return ()
        return self._not_sent(which, self._idle[chunk], sent=sent)

    def _not_sent(self, which: tuple[int, int], both: tuple[Tensor, ...], *, sent: bool) -> tuple[Tensor, ...]:
        """An input and its gradient, without the gradient if the backward ran last: it is the gradient that was `sent`."""
        return both[:1] if sent and which == self._ended else both

    def _idle_correction(self, sent: bool) -> int:
        """Correction in bytes of the sum over idle chunks: plus the last input of the warm-up, minus a gradient that was sent."""
        ended = self._ended if sent else None
        found = 0
        if ended is not None and self._is_idle(ended):
            found -= self._idle_gradients[ended[1]]
        if self._warmup_input_unused and self._warmed_up is not None and not self._is_idle(self._warmed_up):
            both, gradient = self._warmup_bytes
            found += both - gradient if self._warmed_up == ended else both
        return found

    def _sends_nothing(self) -> bool:
        """Whether the backward that ran last was that of the first chunk of the model."""
        return self._ended is not None and self._first[self._ended[1]]

    def _is_idle(self, which: tuple[int, int]) -> bool:
        """Whether this (microbatch, chunk) is the last microbatch of an idle chunk that references its input."""
        microbatch, chunk = which
        return self._last[chunk] == microbatch and not self._in_flight[chunk] and self._idle_bytes[chunk] > 0


def tensors_at(
    index: int, tensors: PipelineTensors, idle: Sequence[tuple[Tensor, ...]], messages: MessageOrder, *, warm: bool
) -> tuple[Tensor, ...]:
    """The tensors of the pipeline schedule that are allocated during the step at this index."""
    walk = PipelineWalk(tensors, idle, messages, warm=warm)
    for earlier in range(walk.first_needed(index), index):
        walk.begin(earlier, messages.order[earlier])
        walk.end(messages.order[earlier])
    walk.begin(index, messages.order[index])
    return walk.tensors(index)


def _has_steady_steps(order: Sequence[Step]) -> bool:
    first = next((index for index, step in enumerate(order) if step.kind == "backward"), 0)
    return any(step.kind == "forward" for step in order[first:])
