"""What activation checkpointing leaves allocated after its backward.

Source: core/tensor_parallel/random.py `CheckpointFunction`, core/transformer/moe/token_dispatcher.py (0.16.1).
"""

from __future__ import annotations

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Tensor


def moe_checkpoint_leftovers(shapes: Shapes) -> tuple[Tensor, Tensor]:
    """The input of a checkpoint around a MoE layer, and the gradient of that input.

    The dispatcher stores the routing probabilities in an attribute. Their autograd graph references both tensors until the
    next forward replaces the probabilities.
    """
    return (shapes.hidden("input of the checkpoint"), shapes.hidden("gradient of the checkpoint's input"))
