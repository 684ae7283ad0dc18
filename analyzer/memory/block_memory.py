"""Memory of one block of operations for one microbatch, at every instant at which a module runs.

The figures are a fold over the operations of `program`, in bytes above the memory before the block's forward. What is allocated
around a block, and differs between its repetitions, is its `Setting`. The tensors of an instant are listed on request. This module
does not depend on other blocks, the pipeline, the optimizer or the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.lowering import covers_layers, operations
from analyzer.program.operations import Operation, OperationKind, Role, with_paths

NO_BYTES: Final = -(1 << 62)
"""Less than every memory figure; used as the maximum over no instants."""


class Setting(NamedTuple):
    """What a pass of a block depends on besides its operations. Sizes are in bytes."""

    held: int = 0
    """In backward: allocated outside the block from the sum of the residual gradients on, which is then a new tensor."""
    shared: int = 0
    """In backward: the gradient that the checkpoint after this block did not free, and the workspace of this block counts too."""
    alone: bool = False
    """In backward: no other microbatch of the chunk is in flight, and module attributes reference `Instant.lingering`."""
    left: bool = False
    """What its checkpoints did not free in an earlier backward is allocated, until tokens are dispatched again."""


class Instant(NamedTuple):
    """Memory while one module runs, in bytes above the memory before the block's forward."""

    number: int
    """Index among the modules that run in this pass, from 0."""
    kind: ModuleKind
    backward: bool
    saved: int
    """Saved for backward, including `leftover`."""
    temporary: int
    """Temporary tensors, in addition to `saved`."""
    leftover: int = 0
    """The part of `saved` that checkpoints inside the block did not free in this backward."""
    shares_leftover: bool = False
    """The workspace of this block already includes the gradient that the checkpoint after this block did not free."""
    past_branch: bool = False
    """In backward: the last branch of the last layer has finished."""
    recomputed: bool = False
    """In backward: a checkpoint runs the forward of the module again."""
    lingering: int = 0
    """In backward: bytes in addition to `bytes` that module attributes still reference if no other microbatch is in flight."""
    module: Module | None = None
    """In backward: the module that runs."""

    @property
    def weight(self) -> tuple[int, ...]:
        """In backward: the shape of the module's weight, of each expert for experts; empty without a trained weight."""
        parameters = () if self.module is None else self.module.parameters
        return next((each.shape[-2:] for each in parameters if each.name == "weight" and not each.frozen), ())

    @property
    def bytes(self) -> int:
        """All allocated bytes."""
        return self.saved + self.temporary


@dataclass(frozen=True)
class BlockMemory:
    """Memory of one block."""

    retained: int
    """Bytes that stay allocated from its forward until its backward."""
    frame: tuple[Tensor, ...]
    """Tensors that local variables reference from its forward until the forward of the chunk returns."""
    forward: tuple[Instant, ...]
    """Every instant of the forward."""
    backward: tuple[Instant, ...]
    """Every instant of the backward."""
    lingering: int
    """`Instant.lingering` after its backward."""
    leftover: int
    """Bytes that its checkpoints do not free in its backward."""
    leftover_gradient: int | None
    """The gradient that its last checkpoint leaves allocated, which the preceding block counts as its residual gradient.

    None without checkpoints."""
    leftover_input: int
    """Bytes of the input of that checkpoint, if the pipeline schedule may also reference this input."""

    def levels(self, setting: Setting, *, backward: bool) -> Iterator[tuple[Instant, int]]:
        """Every instant of the forward or the backward with all allocated bytes, including those of the setting."""
        instants = self.backward if backward else self.forward
        held, shared, alone, left = setting
        earlier = self.leftover + (self.leftover_input if backward else 0)
        last = _last_dispatch(instants, recomputed=backward) if left else 0
        for instant in instants:
            level = instant.saved + instant.temporary
            if instant.past_branch:
                level += held
            if instant.shares_leftover:
                level -= shared
            if alone:
                level += instant.lingering
            if left:
                level += (earlier if instant.number < last else 0) - instant.leftover
            yield instant, level


def _last_dispatch(instants: Sequence[Instant], *, recomputed: bool) -> int:
    """The index of the last dispatch of tokens in a forward, or in the recomputation of a backward; 0 without one."""
    return max((each.number for each in instants if each.kind is ModuleKind.DISPATCH and each.recomputed is recomputed), default=0)


def block_memory(module: Module) -> BlockMemory:
    """The memory of a module's operations, cached per module object."""
    return module.derived(_block_memory)


def highest_level(module: Module, setting: Setting, *, backward: bool) -> int:
    """The maximum of `BlockMemory.levels`, cached per module object; `NO_BYTES` without instants."""
    return module.derived(_highest_level, setting, backward)


def _highest_level(module: Module, setting: Setting, backward: bool) -> int:
    return max((level for _, level in block_memory(module).levels(setting, backward=backward)), default=NO_BYTES)


def explained(module: Module, instant: Instant) -> tuple[str, tuple[Tensor, ...]]:
    """The path of the module that runs at an instant, relative to the parent of the block, and the temporary tensors.

    Raises ValueError if the block has no such instant.
    """
    return module.derived(_explained, instant.number, instant.backward)


def _explained(module: Module, index: int, backward: bool) -> tuple[str, tuple[Tensor, ...]]:
    program = operations(module)
    tensors = _Tensors()
    number = -1
    for path, operation in with_paths(program.backward if backward else program.forward):
        if operation.kind is OperationKind.COMPUTE:
            number += 1
            if number == index:
                return path, tensors.listed()
        else:
            tensors.apply(operation)
    raise ValueError(f"{module.name} has no instant {index}")


def _block_memory(module: Module) -> BlockMemory:
    program = operations(module)
    forward, backward = _Forward(), _Backward(module)
    for operation in program.forward:
        forward.apply(operation)
    for operation in program.backward:
        backward.apply(operation)
    return BlockMemory(
        retained=module.retained_bytes,
        frame=_frame(program.forward),
        forward=tuple(forward.instants),
        backward=tuple(backward.instants),
        lingering=backward.lingering,
        leftover=backward.leftover,
        leftover_gradient=backward.gradient,
        leftover_input=backward.leftover_input,
    )


def _frame(forward: Sequence[Operation]) -> tuple[Tensor, ...]:
    """Tensors that local variables reference at the end of the block's forward."""
    frames = [each.tensors for each in forward if each.role is Role.FRAME and each.kind is OperationKind.ALLOCATE]
    return tuple(tensor for frame in frames for tensor in frame)


class _Forward:
    """Accumulates the operations of a forward, in bytes."""

    def __init__(self) -> None:
        self.instants: list[Instant] = []
        self.saved = 0
        self.temporary = 0

    def apply(self, operation: Operation) -> None:
        kind = operation.kind
        if kind is OperationKind.ALLOCATE:
            self.allocate(operation)
        elif kind is OperationKind.FREE:
            self.free(operation)
        elif kind is OperationKind.COMPUTE:
            self.compute(operation)

    def allocate(self, operation: Operation) -> None:
        role = operation.role
        if role in (Role.SAVED, Role.TOGETHER):
            self.saved += operation.bytes
        elif role is not Role.DISCARDED or not operation.module.children:
            # tensors that a container would save are allocated by its children or by the preceding module
            self.temporary += operation.bytes

    def free(self, operation: Operation) -> None:
        role = operation.role
        if role in (Role.SAVED, Role.TOGETHER):
            self.saved -= operation.bytes
        elif role is not Role.DISCARDED or not operation.module.children:
            self.temporary -= operation.bytes

    def compute(self, operation: Operation) -> None:
        self.instants.append(Instant(len(self.instants), operation.module.kind, False, self.saved, self.temporary))


class _Backward(_Forward):
    """The same for a backward. It starts with all bytes that the forward saved, and counts what checkpoints do not free."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.saved = module.retained_before_backward
        self.lingering = 0
        self._checkpointed = module.derived(_checkpointed)
        self.leftover = 0
        self.leftover_input = 0
        self.gradient: int | None = None
        """Bytes of the gradient that the last checkpoint did not free; None before the first checkpoint."""
        self._shared = 0
        self._shares_from_outside = False
        self._past_branch = False
        self._checkpoint: Module | None = None
        """The checkpoint around layers whose backward is running."""

    def allocate(self, operation: Operation) -> None:
        if operation.role is Role.LEFTOVER:
            self._add_leftover(operation.module)
        elif operation.role is Role.RESIDUAL_SUM:
            self._past_branch = True
            if self._checkpoint is not None:
                self._stop_sharing()
        else:
            super().allocate(operation)
            if operation.role is Role.SAVED and not operation.module.recomputed:
                # of a recomputation: it replaces what module attributes reference
                self.saved -= _lingering(operation.tensors)

    def free(self, operation: Operation) -> None:
        if operation.role is not Role.LEFTOVER:
            super().free(operation)
            if operation.role is Role.SAVED and not operation.module.recomputed and id(operation.module) in self._checkpointed:
                self.saved += _lingering(operation.tensors)
            elif operation.role is Role.SAVED and not operation.module.recomputed:
                self.lingering += _lingering(operation.tensors)
            return
        self._shares_from_outside = self.gradient is None
        self._shared, self.gradient = self.gradient or 0, 0
        self.leftover -= self._shared
        self._checkpoint = operation.module if covers_layers(operation.module) else None

    def _stop_sharing(self) -> None:
        self.leftover += self._shared
        self._shared, self._shares_from_outside = 0, False

    def _add_leftover(self, module: Module) -> None:
        self._stop_sharing()
        lingering = _lingering(module.saved)
        gradient = total_bytes(module.outlives)
        self.leftover += gradient + lingering
        around_layers = covers_layers(module)
        self.leftover_input = 0 if lingering or not around_layers else total_bytes(module.saved)
        self.gradient = gradient if around_layers else 0
        self._checkpoint = None

    def compute(self, operation: Operation) -> None:
        module = operation.module
        self.instants.append(
            Instant(
                len(self.instants),
                module.kind,
                True,
                self.saved + self.leftover,
                self.temporary,
                self.leftover,
                self._shares_from_outside,
                self._past_branch,
                operation.phase == "recompute",
                self.lingering,
                module,
            )
        )


def _lingering(tensors: Iterable[Tensor]) -> int:
    """Bytes that module attributes reference after the backward of their module."""
    return total_bytes(tensor for tensor in tensors if tensor.lingers)


def _checkpointed(module: Module) -> frozenset[int]:
    """The identities of the modules inside checkpoints. `Module.lingering_once` counts what they reference."""
    if module.recomputed:
        return frozenset(id(inside) for child in module.children for _, inside in child.walk())
    return frozenset().union(*(child.derived(_checkpointed) for child in module.children))


class _Tensors:
    """Collects the temporary tensors that are allocated at an instant."""

    def __init__(self) -> None:
        self._workspaces: list[tuple[Tensor, ...]] = []
        self._frame: list[Tensor] = []
        self._transfer: tuple[Tensor, ...] = ()
        self._discarded: tuple[Tensor, ...] = ()

    def apply(self, operation: Operation) -> None:
        allocates, role, tensors = operation.kind is OperationKind.ALLOCATE, operation.role, operation.tensors
        if role is Role.WORKSPACE:
            if allocates:
                self._workspaces.append(tensors)
            else:
                freed = 0
                while freed < len(tensors):  # a checkpoint allocates in two steps, and frees in one
                    freed += len(self._workspaces.pop())
        elif role is Role.RELOADED:
            if allocates:
                self._frame.extend(tensors)
            else:
                for tensor in tensors:
                    self._frame.remove(tensor)
        elif role is Role.FRAME:
            if allocates:
                self._frame.extend(tensors)
            else:
                del self._frame[len(self._frame) - len(tensors) :]
        elif role is Role.TRANSFER:
            self._transfer = tensors if allocates else ()
        elif role is Role.DISCARDED and not operation.module.children:
            self._discarded = tensors if allocates else ()

    def listed(self) -> tuple[Tensor, ...]:
        """All allocated tensors that are not saved for backward, innermost module first."""
        around = [tensor for tensors in reversed(self._workspaces) for tensor in tensors]
        return (*self._discarded, *self._transfer, *around, *self._frame)
