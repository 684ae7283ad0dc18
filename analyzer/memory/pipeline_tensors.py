"""What pipeline stages keep of what they sent and received, longer than it is needed.

Sources: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local names, which keep their tensors until they are bound anew; core/transformer/
transformer_block.py set_input_tensor: a chunk keeps the input that it received last, and with it that input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.layout.stages import Chunk
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Tensor
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob


@dataclass(frozen=True)
class Lingering:
    """What is alive beside a step of this pipeline rank."""

    forward: tuple[Tensor, ...] = ()
    """Once a first backward has run."""
    backward: tuple[Tensor, ...] = ()
    """Likewise."""
    gradient_ahead: tuple[Tensor, ...] = ()
    """Beside a forward, where the backward that comes next waits for a message."""
    input_ahead: tuple[Tensor, ...] = ()
    """Beside a backward, where the forward that comes next does."""
    output: tuple[Tensor, ...] = ()
    """Beside a backward, where the forward before it had something to send."""
    of_warmup: tuple[Tensor, ...] = ()
    """Of the microbatch whose input came last before the first backward, once its own backward has run."""

    def beside(
        self, step: Step, *, previous: Step | None, following: Step | None, after_backward: bool, stages: Stages
    ) -> tuple[Tensor, ...]:
        """What is alive beside `step`, between `previous` and `following`."""
        if step.kind == "forward":
            waits = following is not None and following.kind == "backward" and not stages.is_last(following.chunk)
            return (*(self.forward if after_backward else ()), *(self.gradient_ahead if waits else ()))
        waits = following is not None and following.kind == "forward" and not stages.is_first(following.chunk)
        sends = previous is not None and previous.kind == "forward" and not stages.is_last(previous.chunk)
        return (
            *(self.backward if after_backward else ()),
            *(self.input_ahead if waits else ()),
            *(self.output if sends else ()),
        )


@dataclass(frozen=True)
class Stages:
    """Which chunks of a rank are at the ends of the model: they receive nothing from that side."""

    chunks: Sequence[Chunk]

    def is_first(self, chunk: int) -> bool:
        """Whether it has the embedding."""
        return self.chunks[chunk].pre_process

    def is_last(self, chunk: int) -> bool:
        """Whether it has the loss."""
        return self.chunks[chunk].post_process


def lingering(job: TrainingJob, *, pipeline_rank: int) -> Lingering:
    """Gradients sent and received, and an input, of the microbatch whose backward ran last.

    The gradient that was sent to the previous stage stays until the next one is made, the one that was received from the
    next stage until the next is received, after a forward. While that forward runs, `output_tensor` still names the old
    output, and through its graph the input that it was made from.
    """
    parallel = job.parallel
    shapes = shapes_of(job)
    if parallel.virtual_pipeline is not None:
        return _interleaved(job)
    first = pipeline_rank == 0
    sent = () if first else (shapes.hidden("gradient sent to the previous stage"),)
    old = () if first else (shapes.hidden("input of the microbatch before"),)
    received = (received_gradient(job),) if pipeline_rank < parallel.pipeline - 1 else ()
    return Lingering(forward=(*sent, *old, *received), backward=sent)


def received_gradient(job: TrainingJob) -> Tensor:
    """[s, b, h]: what the next stage sent back, which the frame of the schedule names throughout the backward."""
    return shapes_of(job).hidden("gradient received from the next stage")


def _interleaved(job: TrainingJob) -> Lingering:
    """Every rank sends and receives, since stages form a ring; what comes is asked for one step ahead.

    `forward_backward_pipelining_with_interleaving`: after a forward the input of the next one is received, beside the backward
    that follows where messages overlap; after a backward the gradient of the next one. An output that was sent is emptied
    before the next forward. `input_tensor_grad` names the gradient
    that was sent last, and where messages overlap `input_tensor` the last input of the warm-up until the iteration ends.
    """
    shapes = shapes_of(job)
    sent = (shapes.hidden("gradient sent to the previous stage"),)
    ahead = (shapes.hidden("gradient received ahead"),)
    output = (shapes.hidden("output of the forward before"),)
    if not job.parallel.overlap_p2p:
        return Lingering(forward=sent, backward=sent, gradient_ahead=ahead, output=output)
    return Lingering(
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
