"""Delayed weight gradients (`--delay-wgrad-compute`): computed after the backward of a whole branch of a layer.

Until then their operands stay allocated: the input of each linear layer, and the gradient of its output. It is assumed that
shared experts wait as long as routed experts, and the attention of a chunk's first layer no longer than other attention.

Sources: core/models/gpt/fine_grained_callables.py `TransformerLayerNode.backward_dw`, core/models/common/
model_chunk_schedule_plan.py (0.16.1); transformer_engine/pytorch/module/_common.py `WeightGradStore` (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor

BRANCHES: Final = (ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD, ModuleKind.REPLACED_BRANCH)


def with_delayed_weight_gradients(layer: Module) -> Module:
    """The layer with the operands of delayed weight gradients in the workspace of the modules that run backward meanwhile."""
    children = tuple(_with_waiting(child, [])[0] if child.kind in BRANCHES else child for child in layer.children)
    return replace(layer, children=children)


def _with_waiting(module: Module, waiting: list[Tensor]) -> tuple[Module, list[Tensor]]:
    """A module whose backward starts while the operands in `waiting` are allocated, and what waits after it."""
    if not module.children:
        beside = replace(module, backward_workspace=(*module.backward_workspace, *waiting))
        return beside, [*waiting, *_operands(module)]
    children: list[Module] = []
    for child in reversed(module.children):
        changed, waiting = _with_waiting(child, waiting)
        children.insert(0, changed)
    return replace(module, children=tuple(children)), waiting


def _operands(module: Module) -> tuple[Tensor, ...]:
    """The operands of a linear layer's weight gradient; nothing for other modules. The router is Megatron's own and not delayed.

    If the layer gathers a tensor, or casts it to FP8 by columns, the operand is that copy.
    """
    if module.kind is ModuleKind.ROUTER or not any(each.name == "weight" and len(each.shape) > 1 for each in module.parameters):
        return ()
    read = [tensor for tensor in module.saved if "input" in tensor.name]
    if len(read) > 1:  # a fused norm: its own input comes first
        read = [tensor for tensor in read if tensor.name != "input"]
    gathered = [tensor for tensor in module.backward_workspace if tensor.name.startswith("gathered input")]
    gradients = [tensor for tensor in module.backward_workspace if "output gradient" in tensor.name]
    operands = (*(gathered or read), *_last_form(gradients))
    return tuple(replace(tensor, name=f"{tensor.name} of {module.name}, delayed weight gradient") for tensor in operands)


def _last_form(gradients: list[Tensor]) -> list[Tensor]:
    """Of an output gradient, the copies that the GEMM of the weight gradient reads."""
    for mark in ("column-wise", "gathered"):
        copies = [tensor for tensor in gradients if mark in tensor.name]
        if copies:
            return copies
    return gradients
