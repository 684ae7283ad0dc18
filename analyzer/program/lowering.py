"""Lowers a module tree to operations in the order of execution.

Forward: a module allocates what it saves and its workspace, runs, and frees the workspace; children run in between. Under a
checkpoint the first forward saves nothing. Backward: last module first; a checkpoint runs the forward of its children again
before their backward.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import RESIDUAL_ADDS, ModuleKind
from analyzer.modules.tree import Collective, Module, Tensor
from analyzer.program.operations import Operation, OperationKind, Operations, Phase, Role


def operations(module: Module) -> Operations:
    """The operations of a module, computed once for each module object."""
    return module.derived(_lowered)


def _lowered(module: Module) -> Operations:
    forward, backward = _Lowering(), _Lowering()
    forward.forward(module, module.name, "forward", discards=False)
    backward.backward(module, module.name)
    return Operations(tuple(forward.operations), tuple(backward.operations))


def leaves_tensors(module: Module) -> bool:
    """Whether a checkpoint leaves tensors allocated after its backward."""
    return module.recomputed and (bool(module.outlives) or any(tensor.lingers for tensor in module.saved))


def covers_layers(module: Module) -> bool:
    """Whether this is a checkpoint around whole transformer layers that are not empty."""
    return (
        module.kind is ModuleKind.CHECKPOINT
        and all(child.kind is ModuleKind.LAYER for child in module.children)
        and any(child.children for child in module.children)
    )


class _Lowering:
    """Writes operations while it walks a tree."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def forward(self, module: Module, path: str, phase: Phase, *, discards: bool) -> None:
        """`discards`: under a checkpoint, in its first forward."""
        saved = Role.DISCARDED if discards else Role.SAVED
        self._append(OperationKind.BEGIN, phase, path, module)
        self._memory(OperationKind.ALLOCATE, phase, path, module, saved, module.saved)
        self._memory(OperationKind.ALLOCATE, phase, path, module, Role.WORKSPACE, module.forward_workspace)
        if not (discards or module.recomputed):
            self._memory(OperationKind.ALLOCATE, phase, path, module, Role.FRAME, module.forward_held)
        self._forward_calls(module, path, phase, discards=discards)
        if not module.children:
            self._compute(module, path, phase)
        for child in module.children:
            self.forward(child, f"{path}.{child.name}", phase, discards=discards or module.recomputed)
        if module.recomputed:
            self._append(OperationKind.FREE, phase, path, module, Role.DISCARDED)
        if discards:
            self._memory(OperationKind.FREE, phase, path, module, Role.DISCARDED, module.saved)
        self._memory(OperationKind.FREE, phase, path, module, Role.WORKSPACE, module.forward_workspace)
        self._append(OperationKind.END, phase, path, module)

    def backward(self, module: Module, path: str) -> None:
        self._append(OperationKind.BEGIN, "backward", path, module)
        if leaves_tensors(module):
            self._append(OperationKind.FREE, "backward", path, module, Role.LEFTOVER)
        self._memory(OperationKind.ALLOCATE, "backward", path, module, Role.WORKSPACE, module.backward_workspace)
        for call in module.collectives:
            if call.phase != "forward":
                self._append(OperationKind.COLLECTIVE, "backward", path, module, call=call)
        if not module.children:
            self._compute(module, path, "backward")
        if module.recomputed:
            for child in module.children:
                self.forward(child, f"{path}.{child.name}", "recompute", discards=False)
                self._memory(OperationKind.FREE, "recompute", path, child, Role.FRAME, _held(child))
        branch = _last_branch(module) if module.kind is ModuleKind.LAYER else None
        for child in reversed(module.children):
            self.backward(child, f"{path}.{child.name}")
            if child is branch:
                self._append(OperationKind.ALLOCATE, "backward", path, module, Role.RESIDUAL_SUM)
        self._memory(OperationKind.FREE, "backward", path, module, Role.SAVED, module.saved)
        self._memory(OperationKind.FREE, "backward", path, module, Role.WORKSPACE, module.backward_workspace)
        if leaves_tensors(module):
            left = (*module.outlives, *(tensor for tensor in module.saved if tensor.lingers))
            self._append(OperationKind.ALLOCATE, "backward", path, module, Role.LEFTOVER, left)
        self._append(OperationKind.END, "backward", path, module)

    def _compute(self, module: Module, path: str, phase: Phase) -> None:
        self._memory(OperationKind.ALLOCATE, phase, path, module, Role.TRANSFER, module.offloaded)
        self._append(OperationKind.COMPUTE, phase, path, module)
        self._memory(OperationKind.FREE, phase, path, module, Role.TRANSFER, module.offloaded)

    def _forward_calls(self, module: Module, path: str, phase: Phase, *, discards: bool) -> None:
        """A router computes its losses where gradients are recorded (`TopKRouter.routing`): not in the first forward of a
        checkpoint."""
        if discards and module.kind is ModuleKind.ROUTER:
            return
        for call in module.collectives:
            if call.phase == "forward":
                again = replace(call, phase="recompute") if phase == "recompute" else call
                self._append(OperationKind.COLLECTIVE, phase, path, module, call=again)

    def _memory(
        self, kind: OperationKind, phase: Phase, path: str, module: Module, role: Role, tensors: tuple[Tensor, ...]
    ) -> None:
        if tensors:
            self.operations.append(Operation(kind, phase, path, module, role, tensors))

    def _append(
        self,
        kind: OperationKind,
        phase: Phase,
        path: str,
        module: Module,
        role: Role = Role.NONE,
        tensors: tuple[Tensor, ...] = (),
        *,
        call: Collective | None = None,
    ) -> None:
        self.operations.append(Operation(kind, phase, path, module, role, tensors, call))


def _held(module: Module) -> tuple[Tensor, ...]:
    """What the frames of a module and its children reference to the end of the forward."""
    if module.recomputed:
        return ()
    return (*module.forward_held, *(tensor for child in module.children for tensor in _held(child)))


def _last_branch(layer: Module) -> Module | None:
    """The child with which the backward of a layer leaves its last branch: the first one after the residual add before it."""
    first = None
    for child in reversed(layer.children):
        if first is not None and child.kind in RESIDUAL_ADDS:
            break
        first = child
    return first
