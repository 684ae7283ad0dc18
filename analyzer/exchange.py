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
    first = pipeline_rank == 0
    sent = () if first else (shapes.hidden("gradient sent to the previous stage"),)
    old = () if first else (shapes.hidden("input of the microbatch before"),)
    received = (shapes.hidden("gradient received from the next stage"),) if pipeline_rank < parallel.pipeline - 1 else ()
    return Lingering(forward=(*sent, *old, *received), backward=sent)


def kept_inputs(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Bytes of the last input of each chunk that receives one, and of its gradient, until its next forward."""
    hidden = Shapes(launch).hidden("input").bytes
    return sum(2 * hidden for chunk in chunks if not chunk.pre_process)
