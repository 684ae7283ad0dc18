"""What pipeline stages keep of what they sent and received, longer than it is needed.

Sources: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local names, which keep their tensors until they are bound anew; core/transformer/
transformer_block.py set_input_tensor: a chunk keeps the input that it received last, and with it that input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Tensor
from analyzer.results import Chunk
from analyzer.specs import Launch


@dataclass(frozen=True)
class Lingering:
    """What is alive beside a step once a first backward has run on this pipeline rank."""

    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()


def lingering(launch: Launch, *, pipeline_rank: int) -> Lingering:
    """Gradients sent and received, and an input, of the microbatch whose backward ran last.

    The gradient that was sent to the previous stage stays until the next one is made, the one that was received from the
    next stage until the next is received, after a forward. While that forward runs, `output_tensor` still names the old
    output, and through its graph the input that it was made from.
    """
    parallel = launch.parallel
    shapes = Shapes(launch)
    if parallel.virtual_pipeline is not None:
        return _interleaved(launch)
    first = pipeline_rank == 0
    sent = () if first else (shapes.hidden("gradient sent to the previous stage"),)
    old = () if first else (shapes.hidden("input of the microbatch before"),)
    received = (shapes.hidden("gradient received from the next stage"),) if pipeline_rank < parallel.pipeline - 1 else ()
    return Lingering(forward=(*sent, *old, *received), backward=sent)


def _interleaved(launch: Launch) -> Lingering:
    """Every rank sends and receives, since stages form a ring; what comes is asked for one step ahead.

    `forward_backward_pipelining_with_interleaving`: after a forward the input of the next one is received, beside the backward
    that follows where messages overlap; after a backward the gradient of the next one. `input_tensor_grad` names the gradient
    that was sent last.
    """
    shapes = Shapes(launch)
    sent = shapes.hidden("gradient sent to the previous stage")
    ahead = (shapes.hidden("input received ahead"),) if launch.parallel.overlap_p2p else ()
    return Lingering(forward=(sent, shapes.hidden("gradient received ahead")), backward=(sent, *ahead))


def kept_inputs(launch: Launch, chunks: Sequence[Chunk]) -> tuple[tuple[Tensor, ...], ...]:
    """The last input of each chunk that receives one, and its gradient, until its next forward."""
    shapes = Shapes(launch)
    both = (shapes.hidden("last input of an idle chunk"), shapes.hidden("its gradient"))
    return tuple(() if chunk.pre_process else both for chunk in chunks)
