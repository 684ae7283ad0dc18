"""Delayed weight gradients (`--delay-wgrad-compute`): computed after the backward of a complete branch of a layer.

Until then their operands stay allocated: the input of each linear layer, and the gradient of its output. It is assumed that
operands of shared experts stay allocated as long as those of routed experts, and those of attention in the first layer of
a chunk no longer than in other layers.

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
    """The layer with the operands of delayed weight gradients in the workspaces of the modules whose backward runs before them."""
    children = tuple(_with_pending(child, [])[0] if child.kind in BRANCHES else child for child in layer.children)
    return replace(layer, children=children)


def _with_pending(module: Module, pending: list[Tensor]) -> tuple[Module, list[Tensor]]:
    """A module whose backward starts with `pending` operands allocated, and the operands that are allocated after it."""
    if not module.children:
        changed = replace(module, backward_workspace=(*module.backward_workspace, *pending))
        return changed, [*pending, *_operands(module)]
    children: list[Module] = []
    for child in reversed(module.children):
        changed, pending = _with_pending(child, pending)
        children.insert(0, changed)
    return replace(module, children=tuple(children)), pending


def _operands(module: Module) -> tuple[Tensor, ...]:
    """The operands of a linear layer's weight gradient; empty for other modules. The router is a Megatron module and not delayed.

    If the layer gathers a tensor, or casts it to FP8 column-wise, the operand is that copy.
    """
    if module.kind is ModuleKind.ROUTER or not any(each.name == "weight" and len(each.shape) > 1 for each in module.parameters):
        return ()
    read = [tensor for tensor in module.saved if "input" in tensor.name]
    if len(read) > 1:  # with a fused norm, the input of the norm is first
        read = [tensor for tensor in read if tensor.name != "input"]
    gathered = [tensor for tensor in module.backward_workspace if tensor.name.startswith("gathered input")]
    gradients = [tensor for tensor in module.backward_workspace if "output gradient" in tensor.name]
    operands = (*(gathered or read), *_read_by_gemm(gradients))
    return tuple(replace(tensor, name=f"{tensor.name} of {module.name}, delayed weight gradient") for tensor in operands)


def _read_by_gemm(gradients: list[Tensor]) -> list[Tensor]:
    """The copies of an output gradient that the weight-gradient GEMM reads."""
    for mark in ("column-wise", "gathered"):
        copies = [tensor for tensor in gradients if mark in tensor.name]
        if copies:
            return copies
    return gradients
