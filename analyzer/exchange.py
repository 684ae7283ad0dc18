"""Gradients that the frame of the pipeline schedule still names while the next microbatch runs.

Source: core/pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving (0.16.1): `input_tensor_grad`
and `output_tensor_grad` are local names, which keep their tensors until they are bound anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Tensor
from analyzer.specs import Launch


@dataclass(frozen=True)
class Lingering:
    """What is alive beside a step once a first backward has run on this pipeline rank."""

    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()


def lingering(launch: Launch, *, pipeline_rank: int) -> Lingering:
    """The gradient that was sent to the previous stage stays until the next one is made; the one that was received from the
    next stage until the next is received, after a forward."""
    parallel = launch.parallel
    shapes = Shapes(launch)
    sent = (shapes.hidden("gradient sent to the previous stage"),) if pipeline_rank > 0 else ()
    received = (shapes.hidden("gradient received from the next stage"),) if pipeline_rank < parallel.pipeline - 1 else ()
    return Lingering(forward=(*sent, *received), backward=sent)
