"""Delayed weight gradients (`--delay-wgrad-compute`): computed after the backward of a node of a layer.

With `--overlap-dispatch-backward-with-experts-wgrad` those of routed experts alone are computed, after the backward of the dispatch
(`_RegisterDelayedWgradForExperts`, core/transformer/moe/moe_layer.py, 0.18).

Until then their operands stay allocated: the input of each linear layer, and the gradient of its output. Those of routed experts
and of dense layers are freed after their own backward, those of shared experts after the backward of attention, in the same node.
It is assumed that operands of attention in the first layer of a chunk stay no longer than in other layers.

Gradients that are not fused exist outside the gradient buffer until they are added to it. A linear layer allocates its gradient
when it computes it. A grouped layer allocates those of its experts in its own backward, and autograd keeps a copy of each, because
the store references them.

Sources: core/models/gpt/fine_grained_callables.py `TransformerLayerNode.backward_dw`, core/models/common/
model_chunk_schedule_plan.py (0.16.1); transformer_engine/pytorch/module/_common.py `WeightGradStore`, linear.py `_Linear.backward`,
grouped_linear.py `_GroupedLinear.backward`, base.py `backward_dw` (TE 2.11); torch/csrc/autograd/functions/accumulate_grad.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.experts import (
    INPUT_GRADIENTS,
    SAVED_BY_LAST,
    SAVED_BY_OTHERS,
    WEIGHT_GRADIENT_OF_EXPERT,
    WEIGHT_GRADIENTS_OF_EXPERTS,
)
from analyzer.modules.moe.routing import LATENT_ROWS, is_flex
from analyzer.modules.quantized import is_quantized_copy
from analyzer.modules.tree import Module, Tensor, total_bytes

BRANCHES: Final = (ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD, ModuleKind.REPLACED_BRANCH)


DELAYED: Final = ", delayed weight gradient"
"""End of the names of operands."""
_STORED: Final = "stored weight gradients"
"""Gradients that are not fused, of a grouped layer: from its backward until they are computed."""
_SHARED_OUTPUT_GRADIENT: Final = f"output gradient of linear_fc2{DELAYED}"
"""The operand of the shared experts that is neither gathered nor quantized."""
_LATER: Final = ("weight gradient", WEIGHT_GRADIENT_OF_EXPERT)
"""Gradients that are not fused, of linear layers: allocated when they are computed."""


def with_delayed_weight_gradients(layer: Module, *, fused: bool) -> Module:
    """The layer with the operands of delayed weight gradients in the workspaces of the modules whose backward runs before them.

    `fused`: the gradients are added to the gradient buffer by the GEMM.
    """
    shared: list[Tensor] = []
    pending: list[Tensor] = []
    linear: list[Module] = []
    children: list[Module] = []
    for child in reversed(layer.children):
        changed = child
        if _has(child, ModuleKind.EXPERTS):
            changed, shared = _with_pending_experts(child, fused=fused)
            shared = _not_counted_elsewhere(child, shared)
            linear = [module for each in child.children if _has(each, ModuleKind.SHARED_EXPERTS) for module in _leaves(each)[::-1]]
        elif child.kind in BRANCHES or shared:
            changed, after = _with_pending(child, shared, fused=fused)
            if child.kind is ModuleKind.ATTENTION:
                pending, linear = after, [*linear, *_leaves(child)]
        children.insert(0, changed)
    steps = () if fused else _steps(linear, pending)
    return replace(layer, children=(*steps, *children))


def with_gradients_at_dispatch(layer: Module) -> Module:
    """The layer with the operands of the weight gradients of its routed experts in the backward of their dispatch."""
    if layer.kind is ModuleKind.EXPERTS or not _has(layer, ModuleKind.EXPERTS):
        return layer
    pending: list[Tensor] = []
    children: list[Module] = []
    for child in reversed(layer.children):
        changed = with_gradients_at_dispatch(child)
        if child.kind is ModuleKind.EXPERTS:
            changed, pending = _with_pending(child, [], fused=True)
        elif child.kind is ModuleKind.DISPATCH:
            changed = replace(child, backward_workspace=(*child.backward_workspace, *pending))
        children.insert(0, changed)
    return replace(layer, children=tuple(children))


def operands_of_experts(experts: Module) -> tuple[Tensor, ...]:
    """The operands of a module of routed experts that are allocated after its backward; empty without delayed weight gradients."""
    leaves = _leaves(experts)
    if not any(tensor.name.endswith(DELAYED) for module in leaves for tensor in module.backward_workspace):
        return ()
    return tuple(tensor for module in leaves for tensor in _operands(module))


def _leaves(module: Module) -> list[Module]:
    return [each for _, each in module.walk() if not each.children]


def _has(module: Module, kind: ModuleKind) -> bool:
    return any(each.kind is kind for _, each in module.walk())


def _steps(linear: Sequence[Module], pending: Sequence[Tensor], *, experts: int = 1) -> tuple[Module, ...]:
    """Modules whose backward computes the gradients of linear layers, one after the other: each frees its operands.

    `experts`: number of experts that the layers stand for. The steps of the first one have the most operands.
    """
    left = list(pending)
    steps: list[Module] = []
    for module in linear:
        gradient = tuple(tensor for tensor in module.backward_workspace if tensor.name in _LATER)
        operands = _operands(module)
        if gradient and operands:
            name = f"{module.name}, weight gradient"
            steps.insert(0, Module(name=name, kind=ModuleKind.WEIGHT_GRADIENT, backward_workspace=(*left, *gradient)))
        others = [each for tensor in operands for each in _of_others(tensor, experts)]
        names = {tensor.name for tensor in operands}
        left = [*(tensor for tensor in left if tensor.name not in names), *others]
    return tuple(steps)


def _of_others(tensor: Tensor, experts: int) -> tuple[Tensor, ...]:
    """The part of a tensor of all experts that belongs to all but one."""
    if experts == 1:
        return ()
    return (replace(tensor, shape=(tensor.shape[0] * (experts - 1) // experts, *tensor.shape[1:]), pieces=experts - 1),)


def _with_pending_experts(branch: Module, *, fused: bool) -> tuple[Module, list[Tensor]]:
    """The branch of a MoE layer, and the operands of its shared experts, which are allocated after its backward."""
    shared: list[Tensor] = []
    others: list[Tensor] = []
    children: list[Module] = []
    for child in reversed(branch.children):
        before = [*others, *shared]
        module = _sequential(child) if child.kind is ModuleKind.EXPERTS else child
        changed, after = _with_pending(module, before, fused=fused)
        steps: tuple[Module, ...] = ()
        if child.kind is ModuleKind.EXPERTS and not fused:
            steps = _steps(_leaves(module)[::-1], after, experts=_experts(child))
        children = [*steps, changed, *children]
        if _has(child, ModuleKind.SHARED_EXPERTS):
            shared += after[len(before) :]
        elif child.kind is not ModuleKind.EXPERTS:
            others += after[len(before) :]
    return replace(branch, children=tuple(children)), shared


def _not_counted_elsewhere(branch: Module, operands: list[Tensor]) -> list[Tensor]:
    """The shared experts' operands without those that the attention node counts anyway.

    It counts the gradient of the output of the shared experts, which fc2 reads unless it gathers or quantizes it, or has a gate.
    It counts the output of the norm, which fc1 reads, only if that is what the flex dispatcher reads.
    """
    inside = [each for _, each in branch.walk()]
    gated = any(each.kind is ModuleKind.SHARED_GATE for each in inside)
    dispatched = any(is_flex(each) and all(tensor.name != LATENT_ROWS for tensor in each.saved) for each in inside)
    left = [tensor for tensor in operands if gated or tensor.name != _SHARED_OUTPUT_GRADIENT]
    return left if dispatched else [replace(tensor, shares="") for tensor in left]


def _experts(experts: Module) -> int:
    """The number of experts that run one after the other. 1 for a grouped layer."""
    fc1 = experts.children[0]
    sequential = any(tensor.name in INPUT_GRADIENTS for tensor in fc1.backward_workspace)
    return fc1.parameters[0].pieces if sequential else 1


def _sequential(experts: Module) -> Module:
    """Experts that run one after the other, during the backward of the last one.

    The operands of the others, which the formulas of the experts do not count, stay allocated: gradients of the outputs of fc1.
    Before the backward of fc1, what their activations saved is counted instead. The gradients of the inputs of fc1 stay too, and
    are concatenated in the end. If those activations saved more than both, memory is highest in the backward of the first expert.
    """
    count = _experts(experts)
    if count == 1:
        return experts
    fc1 = experts.children[0]
    rows = experts.backward_workspace[0]
    inputs, concatenated = replace(rows, name=INPUT_GRADIENTS[0], pieces=count), replace(rows, name="their concatenation")
    outputs = _read_by_gemm([tensor for tensor in fc1.backward_workspace if "output gradient" in tensor.name])
    kept = tuple(
        replace(each, name=f"{each.name} of other experts", shape=((count - 1) * each.shape[0], *each.shape[1:]), pieces=count - 1)
        for each in outputs
    )
    saved = total_bytes(experts.children[1].saved) * (count - 1) // count
    held = max(0, total_bytes(_of_others(inputs, count)) - max(0, saved - total_bytes(kept)))
    gradients = (Tensor(name=INPUT_GRADIENTS[1], shape=(held,), dtype="uint8"),)
    own = (tensor for tensor in fc1.backward_workspace if tensor.name not in (*INPUT_GRADIENTS, SAVED_BY_LAST))
    changed = [replace(fc1, backward_workspace=(*own, inputs, concatenated, *kept))]
    for module in experts.children[1:]:
        others = tuple(tensor for tensor in module.backward_workspace if tensor.name != SAVED_BY_OTHERS)
        changed.append(replace(module, backward_workspace=(*others, *gradients)))
    return replace(experts, children=tuple(changed))


def _with_pending(module: Module, pending: list[Tensor], *, fused: bool) -> tuple[Module, list[Tensor]]:
    """A module whose backward starts with `pending` operands allocated, and the operands that are allocated after it."""
    if not module.children:
        changed = module if fused or not _operands(module) else _not_fused(module)
        after = [*pending, *_operands(changed)]
        return replace(changed, backward_workspace=(*changed.backward_workspace, *pending)), _without_shared(after, module)
    children: list[Module] = []
    for child in reversed(module.children):
        changed, pending = _with_pending(child, pending, fused=fused)
        children.insert(0, changed)
    return replace(module, children=tuple(children)), _without_shared(pending, module)


def _without_shared(operands: Sequence[Tensor], module: Module) -> list[Tensor]:
    """Operands after the backward of a module, which frees what it saved: those that share it are then counted themselves."""
    return [replace(each, shares="") if each.shares.startswith(f"{module.name} ") else each for each in operands]


def _not_fused(module: Module) -> Module:
    """A linear layer whose backward does not allocate the gradient of its weight, or a grouped one that allocates it and a copy."""
    own: list[Tensor] = []
    for tensor in module.backward_workspace:
        if tensor.name == WEIGHT_GRADIENTS_OF_EXPERTS:
            own += [replace(tensor, name=_STORED), replace(tensor, name=f"copies of {_STORED}")]
        elif tensor.name not in _LATER:
            own.append(tensor)
    return replace(module, backward_workspace=tuple(own))


def _operands(module: Module) -> tuple[Tensor, ...]:
    """The operands of a linear layer's weight gradient; empty for other modules, and for the router, which is not delayed.

    If the layer gathers or quantizes a tensor, the operands are those copies: one object has the row-wise and column-wise ones.
    """
    weights = any(each.name == "weight" and len(each.shape) > 1 for each in module.parameters)
    if module.kind in (ModuleKind.ROUTER, ModuleKind.CONVOLUTION) or not weights:
        return ()
    read = [tensor for tensor in module.saved if "input" in tensor.name]
    if len(read) > 1:  # with a fused norm, the input of the norm is first
        read = [tensor for tensor in read if tensor.name != "input"]
    own = [tensor for tensor in module.backward_workspace if not tensor.name.endswith(DELAYED)]
    gathered = _quantized_input(own) or [tensor for tensor in own if tensor.name.startswith("gathered input")]
    gradients = [tensor for tensor in own if "output gradient" in tensor.name]
    stored = [tensor for tensor in own if tensor.name.endswith(_STORED)]
    operands = (*(gathered or read), *_read_by_gemm(gradients), *stored)
    return tuple(replace(tensor, name=f"{tensor.name} of {module.name}{DELAYED}") for tensor in operands)


def _quantized_input(workspace: list[Tensor]) -> list[Tensor]:
    """The quantized copies of the input in the object that the weight-gradient GEMM reads; empty if it quantizes none.

    With block scales a row-wise copy is only what the gathered column-wise one is transposed from.
    """
    copies = [tensor for tensor in workspace if is_quantized_copy(tensor) and "input" in tensor.name]
    copies = [tensor for tensor in copies if "gathered" in tensor.name] or copies
    by_block = any(tensor.name.startswith("scales of") and prod(tensor.shape) > 1 for tensor in copies)
    return [tensor for tensor in copies if "column-wise" in tensor.name] if by_block else copies


def _read_by_gemm(gradients: list[Tensor]) -> list[Tensor]:
    """The copies of an output gradient in the object that the weight-gradient GEMM reads."""
    copies = [tensor for tensor in gradients if is_quantized_copy(tensor)]
    return copies or [tensor for tensor in gradients if "gathered" in tensor.name] or gradients
