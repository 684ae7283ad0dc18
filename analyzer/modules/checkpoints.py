"""What activation checkpointing leaves allocated after its backward.

Source: core/tensor_parallel/random.py `CheckpointFunction`, core/transformer/moe/token_dispatcher.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor

INPUT_GRADIENT: Final = "gradient of the checkpoint's input"
"""Name of a gradient that a checkpoint around a MoE layer leaves allocated."""


def moe_checkpoint_leftovers(made: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """The input of a checkpoint around a MoE layer, and the gradient of that input. `made` gives a tensor of its size.

    The dispatcher stores the routing probabilities in an attribute. Their autograd graph references both tensors until the
    next forward replaces the probabilities.
    """
    return (made("input of the checkpoint"), made(INPUT_GRADIENT))


def holding_gradient(shapes: Shapes, children: tuple[Module, ...]) -> tuple[tuple[Tensor, ...], tuple[Module, ...]]:
    """The gradient of a branch's output, and the modules in a checkpoint around the branch, which use it.

    The arguments of `CheckpointFunction.backward` reference the gradient until the checkpoint's backward ends. Without dropout it
    is the residual gradient, which is allocated in any case. If a norm is the last module, only that reads it.
    """
    held = shapes.branch_gradient
    normed = shapes.model.branch_norms
    if not held.bytes or (normed and shapes.model.hidden_dropout == 0):
        return (), children
    named = replace(held, name="gradient of the checkpoint's output")
    before, reading = (children[:-1], children[-1:]) if normed else ((), children)
    return (named,), (*before, *(_sharing(child, held, named.name) for child in reading))


def _sharing(module: Module, held: Tensor, name: str) -> Module:
    workspace = tuple(replace(each, shares=name) if each == held else each for each in module.backward_workspace)
    return replace(module, backward_workspace=workspace, children=tuple(_sharing(each, held, name) for each in module.children))
