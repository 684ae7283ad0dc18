"""Operations of a module in the order of execution: begin, compute, collective, allocate, free, end.

Lowering a module tree gives a sequence of operations for its forward and one for its backward (`lowering`). Everything that
needs an order reads these sequences: memory, the allocator replay, communication and the comparison with traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Literal, NamedTuple

from analyzer.modules.tree import Collective, Module, Tensor

Phase = Literal["forward", "backward", "recompute"]
"""Recompute: the second forward of a module under a checkpoint, which runs in the backward."""


class OperationKind(Enum):
    """What an operation does."""

    BEGIN = auto()
    """A module starts to run; its children run until its END."""
    END = auto()
    ALLOCATE = auto()
    FREE = auto()
    COMPUTE = auto()
    """A module without children runs."""
    COLLECTIVE = auto()


class Role(Enum):
    """Why tensors are allocated, and so for how long."""

    SAVED = auto()
    """Saved for backward: from the module's forward until its backward."""
    DISCARDED = auto()
    """What a module under a checkpoint would save, in the first forward: freed after the module has run.

    A free of this role without tensors ends the first forward of the checkpoint.
    """
    WORKSPACE = auto()
    """Temporary tensors: while the module and its children run."""
    TRANSFER = auto()
    """Tensors that are saved on the host: on the GPU while their module runs."""
    FRAME = auto()
    """Referenced by a local variable until the forward of the chunk returns (`Module.forward_held`)."""
    LEFTOVER = auto()
    """Still allocated after the backward of a checkpoint, until its next forward.

    A free of this role at the start of a checkpoint's backward has no tensors. The gradient that the checkpoint after it left is
    the gradient of the residual stream, which the workspace of this checkpoint counts until the residual gradient is a new
    tensor.
    """
    RESIDUAL_SUM = auto()
    """The gradient of the residual stream becomes a new tensor: the backward has passed a branch of the layer. Has no tensors."""
    NONE = auto()
    """For operations that neither allocate nor free."""


class Operation(NamedTuple):
    """One step of a module."""

    kind: OperationKind
    phase: Phase
    module: Module
    role: Role = Role.NONE
    tensors: tuple[Tensor, ...] = ()
    bytes: int = 0
    """Of the tensors."""
    call: Collective | None = None
    """For a collective."""


class Operations(NamedTuple):
    """A module's forward and backward for one microbatch."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def with_paths(operations: Iterable[Operation], parent: str = "") -> Iterator[tuple[str, Operation]]:
    """Every operation with the dotted path of its module, below `parent`."""
    paths = [parent] if parent else []
    for operation in operations:
        if operation.kind is OperationKind.BEGIN:
            paths.append(f"{paths[-1]}.{operation.module.name}" if paths else operation.module.name)
        yield paths[-1], operation
        if operation.kind is OperationKind.END:
            paths.pop()
