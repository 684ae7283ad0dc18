"""The tensors of the messages between pipeline stages (`analyzer.program.schedule.references`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.layout.stages import Chunk, mtp_stage
from analyzer.memory.order import has_leaf_input
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor
from analyzer.program.schedule.iteration import Moment
from analyzer.program.schedule.references import BEFORE, Kind, Message
from analyzer.specs import TrainingJob

_NAMES: Final = {
    Kind.INPUT: "input of an earlier microbatch",
    Kind.NEXT_INPUT: "input received ahead",
    Kind.INPUT_GRADIENT: "gradient sent to the previous stage",
    Kind.OUTPUT: "output sent to the next stage",
    Kind.OUTPUT_GRADIENT: "gradient received from the next stage",
}
WAITING: Final = "messages of later steps"


@dataclass(frozen=True)
class MessageTensors:
    """[s, b, h]: the messages of a pipeline rank."""

    job: TrainingJob
    pipeline_rank: int
    freed: tuple[bool, ...]
    """For each chunk, whether activation offloading frees its input in its forward."""
    first_stays: bool = False
    """But not that of the microbatch whose backward runs first, in the last chunk."""
    static_gradients: tuple[bool, ...] = ()
    """For each chunk, whether the gradient of its input is a static tensor of a CUDA graph, which is counted as such."""

    def at(self, moment: Moment) -> tuple[Tensor, ...]:
        """The tensors that exist during a step."""
        waiting = (_message(self.job, WAITING, sender=0) for _ in range(moment.waiting))
        idle = (Message(kind, *each) for each in moment.idle for kind in (Kind.INPUT, Kind.INPUT_GRADIENT))
        return (*self.of(moment.held), *self.of(tuple(idle)), *waiting)

    def bytes_at(self, moment: Moment) -> int:
        """Bytes of the same."""
        waiting = moment.waiting * self._by_kind[Kind.NEXT_INPUT].bytes if moment.waiting else 0
        return self.bytes(moment.held) + waiting + sum([self._of_idle[chunk] for _, chunk in moment.idle])

    @cached_property
    def _of_idle(self) -> list[int]:
        """For each chunk, bytes of an input that it references, and of the gradient of it."""
        both = (Kind.INPUT, Kind.INPUT_GRADIENT)
        return [self.bytes([Message(kind, BEFORE, chunk) for kind in both]) for chunk in range(len(self.freed))]

    def of(self, messages: Sequence[Message]) -> tuple[Tensor, ...]:
        """The tensors of messages."""
        return tuple(self._by_kind[each.kind] for each in messages if not self._has_no_data(each))

    def bytes(self, messages: Sequence[Message]) -> int:
        """Bytes of messages."""
        tensors = self._by_kind
        if self._one_size:
            return len(messages) * tensors[Kind.INPUT].bytes
        return sum(tensors[each.kind].bytes for each in messages if not self._has_no_data(each))

    @property
    def largest(self) -> int:
        """Bytes of the largest message."""
        return max(each.bytes for each in self._by_kind.values())

    @cached_property
    def _by_kind(self) -> dict[Kind, Tensor]:
        senders = {kind: self.pipeline_rank - (kind < Kind.OUTPUT) for kind in _NAMES}
        return {kind: _message(self.job, _name(self.job, kind, self.pipeline_rank), sender=senders[kind]) for kind in _NAMES}

    @cached_property
    def _one_size(self) -> bool:
        """Whether all messages have the same size."""
        sizes = {each.bytes for each in self._by_kind.values()}
        return len(sizes) == 1 and not any(self.freed) and not any(self.static_gradients)

    def _has_no_data(self, message: Message) -> bool:
        if message.kind is Kind.INPUT and self.freed[message.chunk]:
            return not (self.first_stays and message.microbatch == 0 and message.chunk == len(self.freed) - 1)
        return message.kind is Kind.INPUT_GRADIENT and any(self.static_gradients) and self.static_gradients[message.chunk]


def received_gradient(job: TrainingJob, *, sender: int = 0) -> Tensor:
    """[s, b, h]: the gradient from the stage after `sender`. The schedule references it during the backward of `sender`."""
    return _message(job, _NAMES[Kind.OUTPUT_GRADIENT], sender=sender)


def kept_inputs(
    job: TrainingJob, chunks: Sequence[Chunk], *, pipeline_rank: int, freed: Sequence[bool]
) -> tuple[tuple[Tensor, ...], ...]:
    """For each chunk, the input that it received last and the gradient of this input, which are referenced until its next forward.

    Empty for a chunk that receives no input, unless a dispatcher of experts references a leaf of autograd (`_is_leaf_of_router`).
    `freed`: as in `MessageTensors`; such an input is a tensor without elements.
    """
    kinds, sender = (Kind.INPUT, Kind.INPUT_GRADIENT), pipeline_rank - 1
    received, gradient = (_message(job, _name(job, kind, pipeline_rank), sender=sender) for kind in kinds)
    without_data = replace(received, shape=(0,))
    pairs = [(without_data if each else received, gradient) for each in freed]
    keeps = [not chunk.pre_process or _is_leaf_of_router(job, chunk) for chunk in chunks]
    return tuple(pair if each else () for each, pair in zip(keeps, pairs, strict=True))


def _name(job: TrainingJob, kind: Kind, pipeline_rank: int) -> str:
    """The first stage sends no gradient, except in an interleaved schedule."""
    sends = pipeline_rank > 0 or job.parallel.virtual_pipeline is not None
    return _NAMES[kind] if sends or kind is not Kind.INPUT_GRADIENT else "gradient of the input of the first layer"


def _is_leaf_of_router(job: TrainingJob, chunk: Chunk) -> bool:
    """Whether a token dispatcher keeps probabilities whose autograd graph goes back to the input of the first layer.

    Under full recompute it only goes back to the input of a checkpoint.
    """
    moe = job.model.moe
    if moe is None or job.recompute.granularity == "full" or not has_leaf_input(job):
        return False
    return any(moe.layers[layer - 1] for layer in chunk.layers)


def _message(job: TrainingJob, name: str, *, sender: int) -> Tensor:
    """The output of stage `sender` or its gradient. From the stage with MTP layers on, it has the hidden states of all depths."""
    shapes = shapes_of(job)
    one = shapes.hidden(name) if job.model.hyper_connections is None else shapes.stream(name)
    depths = job.model.mtp_num_layers
    if not depths or job.parallel.virtual_pipeline is not None or sender < mtp_stage(job.parallel):
        return one
    return replace(one, shape=((1 + depths) * one.shape[0], *one.shape[1:]), formula=f"(1+D)·{one.formula}")
