"""Operations of a module in the order of execution: begin, compute, collective, allocate, free, end.

`lowering` converts a module tree to one sequence of operations for its forward and one for its backward. The memory computation,
the allocator replay, the communication volumes and the comparison with traces read these sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Literal, NamedTuple

from analyzer.modules.tree import Collective, Module, Tensor, total_bytes

Phase = Literal["forward", "backward", "recompute"]
"""`recompute` is the second forward of a module under a checkpoint, which runs in the backward."""


class OperationKind(Enum):
    """The kind of an operation."""

    BEGIN = auto()
    """A module starts. All operations until its END belong to it or to its children."""
    END = auto()
    ALLOCATE = auto()
    FREE = auto()
    COMPUTE = auto()
    """A module without children runs."""
    COLLECTIVE = auto()


class Role(Enum):
    """The purpose of tensors, which determines how long they are allocated."""

    SAVED = auto()
    """Saved for backward: from the module's forward until its backward."""
    DISCARDED = auto()
    """Tensors that a module would save without a checkpoint. In the first forward they are freed after the module has run.

    A FREE operation with this role and without tensors ends the first forward of the checkpoint.
    """
    TOGETHER = auto()
    """`Module.discards`: a FREE operation in the forward, and an ALLOCATE operation in the backward."""
    WORKSPACE = auto()
    """Temporary tensors, allocated while the module and its children run."""
    TRANSFER = auto()
    """Tensors that are saved on the host. They are on the GPU only while their module runs."""
    RELOADED = auto()
    """Allocated at the end of a module's backward until the backward of the block ends (`Module.reloads`).

    A preceding layer then counts tensors copied back from the host as saved.
    """
    FRAME = auto()
    """Referenced by a local variable until the forward of the chunk returns (`Module.forward_held`)."""
    LEFTOVER = auto()
    """Still allocated after the backward of a checkpoint, until its next forward.

    A FREE operation with this role starts the backward of a checkpoint. It has no tensors. The leftover of the following checkpoint
    contains the gradient of the residual stream. The workspace of this checkpoint also counts this gradient, until the residual
    gradient becomes a new tensor.
    """
    RESIDUAL_SUM = auto()
    """The backward of a layer's last branch has finished: the gradient of the residual stream is a new tensor. Has no tensors."""
    NONE = auto()
    """For operations that do not allocate or free memory."""


class Operation(NamedTuple):
    """One operation of a module."""

    kind: OperationKind
    phase: Phase
    module: Module
    role: Role = Role.NONE
    tensors: tuple[Tensor, ...] = ()
    bytes: int = 0
    """Sum of the bytes of `tensors`."""
    call: Collective | None = None
    """The communication call, for COLLECTIVE only."""
    without_gradients: bool = False
    """For COMPUTE and COLLECTIVE: of the first forward under a checkpoint, where autograd is disabled."""


class Operations(NamedTuple):
    """A module's forward and backward for one microbatch."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


def add_memory(
    found: list[Operation], kind: OperationKind, phase: Phase, module: Module, role: Role, tensors: tuple[Tensor, ...]
) -> None:
    """Appends the operation that allocates or frees these tensors, if there are any."""
    if tensors:
        found.append(Operation(kind, phase, module, role, tensors, total_bytes(tensors)))


def with_paths(operations: Iterable[Operation], parent: str = "") -> Iterator[tuple[str, Operation]]:
    """Every operation with the dotted path of its module. Paths begin with `parent`."""
    paths = [parent] if parent else []
    for operation in operations:
        if operation.kind is OperationKind.BEGIN:
            paths.append(f"{paths[-1]}.{operation.module.name}" if paths else operation.module.name)
        yield paths[-1], operation
        if operation.kind is OperationKind.END:
            paths.pop()
