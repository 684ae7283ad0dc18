"""Delayed weight gradients (`--delay-wgrad-compute`): computed after the backward of a node of a layer.

Until then their operands stay allocated: the input of each linear layer, and the gradient of its output. Those of routed experts
and of dense layers are freed after their own backward, those of shared experts after the backward of attention, in the same node.
It is assumed that operands of attention in the first layer of a chunk stay no longer than in other layers.

Sources: core/models/gpt/fine_grained_callables.py `TransformerLayerNode.backward_dw`, core/models/common/
model_chunk_schedule_plan.py (0.16.1); transformer_engine/pytorch/module/_common.py `WeightGradStore` (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor

BRANCHES: Final = (ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD, ModuleKind.REPLACED_BRANCH)


DELAYED: Final = ", delayed weight gradient"
"""End of the names of operands."""


def with_delayed_weight_gradients(layer: Module) -> Module:
    """The layer with the operands of delayed weight gradients in the workspaces of the modules whose backward runs before them."""
    shared: list[Tensor] = []
    children: list[Module] = []
    for child in reversed(layer.children):
        if _has(child, ModuleKind.EXPERTS):
            changed, shared = _with_pending_experts(child)
        elif child.kind in BRANCHES or shared:
            changed = _with_pending(child, shared)[0]
        else:
            changed = child
        children.insert(0, changed)
    return replace(layer, children=tuple(children))


def operands_of_experts(experts: Module) -> tuple[Tensor, ...]:
    """The operands of a module of routed experts that are allocated after its backward; empty without delayed weight gradients."""
    leaves = [module for _, module in experts.walk() if not module.children]
    if not any(tensor.name.endswith(DELAYED) for module in leaves for tensor in module.backward_workspace):
        return ()
    return tuple(tensor for module in leaves for tensor in _operands(module))


def _has(module: Module, kind: ModuleKind) -> bool:
    return any(each.kind is kind for _, each in module.walk())


def _with_pending_experts(branch: Module) -> tuple[Module, list[Tensor]]:
    """The branch of a MoE layer, and the operands of its shared experts, which are allocated after its backward."""
    shared: list[Tensor] = []
    others: list[Tensor] = []
    children: list[Module] = []
    for child in reversed(branch.children):
        before = [*others, *shared]
        changed, after = _with_pending(child, before)
        children.insert(0, changed)
        if _has(child, ModuleKind.SHARED_EXPERTS):
            shared += after[len(before) :]
        elif child.kind is not ModuleKind.EXPERTS:
            others += after[len(before) :]
    return replace(branch, children=tuple(children)), shared


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
    own = [tensor for tensor in module.backward_workspace if not tensor.name.endswith(DELAYED)]
    gathered = [tensor for tensor in own if tensor.name.startswith("gathered input")]
    gradients = [tensor for tensor in own if "output gradient" in tensor.name]
    operands = (*(gathered or read), *_read_by_gemm(gradients))
    return tuple(replace(tensor, name=f"{tensor.name} of {module.name}{DELAYED}") for tensor in operands)


def _read_by_gemm(gradients: list[Tensor]) -> list[Tensor]:
    """The copies of an output gradient that the weight-gradient GEMM reads."""
    for mark in ("column-wise", "gathered"):
        copies = [tensor for tensor in gradients if mark in tensor.name]
        if copies:
            return copies
    return gradients
