"""Lowers a module tree to operations in the order of execution.

Forward: a module allocates its saved tensors and its workspace, runs itself or its children, and frees the workspace. Under a
checkpoint the first forward saves no tensors, but local variables reference some of them (`local_variables`). Backward: modules run
in reverse order, and a checkpoint runs the forward of its children again before their backward. The operations of a module include
those of its children, which are cached per module object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import BRANCH_ENDS, RESIDUAL_ADDS, ModuleKind
from analyzer.modules.tree import STREAM, Module, Tensor, total_bytes
from analyzer.program.local_variables import WITH_VARIABLES, LocalVariables, discarded, workspace_without_gradients
from analyzer.program.operations import Operation, OperationKind, Operations, Phase, Role, add_memory

_BEGIN, _END, _COMPUTE = OperationKind.BEGIN, OperationKind.END, OperationKind.COMPUTE
_ALLOCATE, _FREE, _COLLECTIVE = OperationKind.ALLOCATE, OperationKind.FREE, OperationKind.COLLECTIVE

_COPIED_AFTER: Final = {
    ModuleKind.ATTENTION_NORM: RESIDUAL_ADDS,
    ModuleKind.FEED_FORWARD_NORM: RESIDUAL_ADDS,
    ModuleKind.ACTIVATION: frozenset({ModuleKind.FC2}),
}
"""Modules whose offloaded tensors are copied to the host after a later module, by its kinds: it reads them, or holds them."""


def operations(module: Module) -> Operations:
    """The forward and backward operations of a module and its children."""
    return Operations(module.derived(_forward, "forward", False), module.derived(_backward))


def leaves_tensors(module: Module) -> bool:
    """Whether a checkpoint leaves tensors allocated after its backward."""
    return module.recomputed and (bool(module.outlives) or any(tensor.lingers for tensor in module.saved))


def covers_layers(module: Module) -> bool:
    """Whether a module is a checkpoint around complete transformer layers that are not all empty."""
    return (
        module.kind is ModuleKind.CHECKPOINT
        and all(child.kind is ModuleKind.LAYER for child in module.children)
        and any(child.children for child in module.children)
    )


def _forward(module: Module, phase: Phase, discards: bool, referenced: frozenset[str] = frozenset()) -> tuple[Operation, ...]:
    """The operations of a forward. `discards`: it is the first forward under a checkpoint.

    `referenced`: the modules whose outputs local variables of a layer around the module reference in that forward (`made_in`).
    """
    found = [Operation(_BEGIN, phase, module)]
    saved = Role.DISCARDED if discards else Role.SAVED
    kept = discarded(module, referenced) if discards else module.saved
    add_memory(found, _ALLOCATE, phase, module, saved, kept)
    workspace = module.forward_workspace
    if phase == "recompute" and module.recompute_workspace is not None:
        workspace = module.recompute_workspace
    if discards:
        workspace = workspace_without_gradients(module, workspace, referenced)
    add_memory(found, _ALLOCATE, phase, module, Role.WORKSPACE, workspace)
    if not (discards or module.recomputed):
        add_memory(found, _ALLOCATE, phase, module, Role.FRAME, module.forward_held)
    found += _forward_collectives(module, phase, discards)
    if not module.children:
        _compute(found, module, phase, discards=discards)
    later: list[Module] = []
    frame = LocalVariables(module, phase, referenced) if (discards or module.recomputed) and module.kind in WITH_VARIABLES else None
    for child in module.children:
        outside = referenced if frame is None else frame.before(found, child)
        found += child.derived(_forward, phase, discards or module.recomputed, outside)
        if later and child.kind in _COPIED_AFTER[later[-1].kind]:
            copied = later.pop()
            add_memory(found, _FREE, phase, copied, Role.WORKSPACE, _only_offloaded(copied))
        if child.kind in _COPIED_AFTER and _only_offloaded(child) and phase == "forward":
            later.append(child)
            add_memory(found, _ALLOCATE, phase, child, Role.WORKSPACE, _only_offloaded(child))
    if frame is not None:
        frame.end(found)
    if module.recomputed:
        found.append(Operation(_FREE, phase, module, Role.DISCARDED))
    if discards:
        add_memory(found, _FREE, phase, module, Role.DISCARDED, kept)
    add_memory(found, _FREE, phase, module, Role.WORKSPACE, workspace)
    if phase == "forward":
        add_memory(found, _FREE, phase, module, Role.TOGETHER, module.discards)
    found.append(Operation(_END, phase, module))
    return tuple(found)


def _forward_collectives(module: Module, phase: Phase, discards: bool) -> Iterator[Operation]:
    """The collectives of a module in a forward."""
    # losses are computed only if gradients are enabled (`TopKRouter.routing`, `DSAttention.forward`): not in the first forward of a
    # checkpoint
    if discards and module.kind in (ModuleKind.ROUTER, ModuleKind.INDEX_LOSS):
        return
    for call in module.collectives:
        if call.phase == "forward":
            repeated = replace(call, phase="recompute") if phase == "recompute" else call
            plain = replace(call, dtype=call.dtype_without_gradients or call.dtype) if discards else repeated
            yield Operation(_COLLECTIVE, phase, module, call=plain, without_gradients=discards)


def _backward(module: Module) -> tuple[Operation, ...]:
    found = [Operation(_BEGIN, "backward", module)]
    if not module.differentiable:
        return (*found, Operation(_END, "backward", module))
    add_memory(found, _ALLOCATE, "backward", module, Role.TOGETHER, module.discards)
    if leaves_tensors(module) or covers_layers(module):
        found.append(Operation(_FREE, "backward", module, Role.LEFTOVER))
    add_memory(found, _ALLOCATE, "backward", module, Role.WORKSPACE, module.backward_workspace)
    found += [Operation(_COLLECTIVE, "backward", module, call=call) for call in module.collectives if call.phase != "forward"]
    if not module.children:
        _compute(found, module, "backward")
    if module.recomputed:
        add_memory(found, _FREE, "backward", module, Role.SAVED, _freed_first(module))
        for child in module.children:
            found += child.derived(_forward, "recompute", False)
            add_memory(found, _FREE, "recompute", child, Role.FRAME, _held(child))
        add_memory(found, _ALLOCATE, "backward", module, Role.WORKSPACE, module.recomputed_last)
    branch = _last_branch(module) if module.kind is ModuleKind.LAYER else None
    for child in reversed(module.children):
        found += child.derived(_backward)
        if child is branch:
            found.append(Operation(_ALLOCATE, "backward", module, Role.RESIDUAL_SUM))
    first = _freed_first(module)
    add_memory(found, _FREE, "backward", module, Role.SAVED, tuple(tensor for tensor in module.saved if tensor not in first))
    add_memory(found, _FREE, "backward", module, Role.WORKSPACE, (*module.recomputed_last, *module.backward_workspace))
    add_memory(found, _ALLOCATE, "backward", module, Role.RELOADED, module.reloads)
    if module.frees_reloads:
        reloads = tuple(tensor for _, inside in module.walk() for tensor in inside.reloads)
        add_memory(found, _FREE, "backward", module, Role.RELOADED, reloads)
    if leaves_tensors(module):
        left = (*module.outlives, *(tensor for tensor in module.saved if tensor.lingers))
        found.append(Operation(_ALLOCATE, "backward", module, Role.LEFTOVER, left, total_bytes(left)))
    found.append(Operation(_END, "backward", module))
    return tuple(found)


def _compute(found: list[Operation], module: Module, phase: Phase, *, discards: bool = False) -> None:
    if phase == "backward":
        earlier = module.reloaded_early or module.reloaded_within
        role = Role.SAVED if module.reloaded_early else Role.RELOADED if module.reloaded_within else Role.TRANSFER
        copied = module.copied_back if earlier else module.copied_on_demand
        add_memory(found, _ALLOCATE if not earlier else _FREE, phase, module, role, copied if not earlier else _read_first(copied))
        add_memory(found, _FREE, phase, module, Role.SAVED, _freed_first(module))
        found.append(Operation(_COMPUTE, phase, module))
        add_memory(found, _FREE, phase, module, role, tuple(tensor for tensor in copied if not tensor.read_first))
        return
    add_memory(found, _ALLOCATE, phase, module, Role.TRANSFER, _only_offloaded(module))
    found.append(Operation(_COMPUTE, phase, module, without_gradients=discards))
    add_memory(found, _FREE, phase, module, Role.TRANSFER, _only_offloaded(module))


def _read_first(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.read_first)


def _freed_first(module: Module) -> tuple[Tensor, ...]:
    """The saved tensors that are freed before the peak of its backward.

    A later module also saves its output, and keeps it on the GPU until the backward of that module ends. A checkpoint frees the
    part of its input that it saved when it has gathered the input.
    """
    reads_first = module.saved_by_hooks or module.recomputed

    def freed_first(tensor: Tensor) -> bool:
        return (tensor in module.offloaded and tensor.made_in != STREAM) or (tensor.read_first and reads_first)

    return tuple(tensor for tensor in module.saved if freed_first(tensor))


def _only_offloaded(module: Module) -> tuple[Tensor, ...]:
    """The offloaded tensors that nothing else keeps on the GPU."""
    return tuple(tensor for tensor in module.offloaded if tensor not in module.saved)


def _held(module: Module) -> tuple[Tensor, ...]:
    """Tensors that local variables of a module and its children reference until the end of the forward."""
    if module.recomputed:
        return ()
    return (*module.forward_held, *(tensor for child in module.children for tensor in _held(child)))


def _last_branch(layer: Module) -> Module | None:
    """The first child of the layer's last branch, which is the last one in backward: the child after the preceding residual add."""
    first = None
    for child in reversed(layer.children):
        if first is not None and child.kind in BRANCH_ENDS:
            break
        first = child
    return first
