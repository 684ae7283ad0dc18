"""Weight gradients that wait until a branch of a layer has been through backward (`--delay-wgrad-compute`).

Meanwhile what they are made of stays: the input of each linear layer, and the gradient of its output. The shared experts are
taken to wait as long as the others, and attention of a chunk's first layer no longer than that of the rest.

Sources: core/models/gpt/fine_grained_callables.py `TransformerLayerNode.backward_dw`, core/models/common/
model_chunk_schedule_plan.py (0.16.1); transformer_engine/pytorch/module/_common.py `WeightGradStore` (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.tree import Module, Tensor

BRANCHES: Final = ("self_attention", "mlp")
NOT_DELAYED: Final = ("router",)
"""Modules with a weight that Megatron multiplies by itself, not Transformer Engine."""


def delayed(layer: Module) -> Module:
    """The same layer, with what its weight gradients wait for beside whatever goes backward in between."""
    children = tuple(_with_waiting(child, [])[0] if child.name in BRANCHES else child for child in layer.children)
    return replace(layer, children=children)


def _with_waiting(module: Module, waiting: list[Tensor]) -> tuple[Module, list[Tensor]]:
    """A module whose backward begins with so many tensors waiting, and what waits once it is over."""
    if not module.children:
        beside = replace(module, backward_workspace=(*module.backward_workspace, *waiting))
        return beside, [*waiting, *_operands(module)]
    children: list[Module] = []
    for child in reversed(module.children):
        changed, waiting = _with_waiting(child, waiting)
        children.insert(0, changed)
    return replace(module, children=tuple(children)), waiting


def _operands(module: Module) -> tuple[Tensor, ...]:
    """What the weight gradient of a linear layer is made of; nothing of other modules.

    Of a tensor that the layer gathers, or casts to FP8 by columns, that copy.
    """
    if module.name in NOT_DELAYED or not any(each.name == "weight" and len(each.shape) > 1 for each in module.parameters):
        return ()
    read = [tensor for tensor in module.saved if "input" in tensor.name]
    if len(read) > 1:  # of a layer with its norm, the input of which comes first
        read = [tensor for tensor in read if tensor.name != "input"]
    gathered = [tensor for tensor in module.backward_workspace if tensor.name.startswith("gathered input")]
    gradients = [tensor for tensor in module.backward_workspace if "output gradient" in tensor.name]
    operands = (*(gathered or read), *_last_form(gradients))
    return tuple(replace(tensor, name=f"{tensor.name} of {module.name}, waiting") for tensor in operands)


def _last_form(gradients: list[Tensor]) -> list[Tensor]:
    """Of an output's gradient, the copies that the weight's product reads."""
    for mark in ("by columns", "gathered"):
        copies = [tensor for tensor in gradients if mark in tensor.name]
        if copies:
            return copies
    return gradients
