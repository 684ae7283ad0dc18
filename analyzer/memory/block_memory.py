"""Memory of one block of operations for one microbatch: every instant at which a module runs, relative to the block's start.

A fold over the operations of `program`, in bytes. The tensors of an instant are listed on request. Nothing here knows other blocks,
pipelines, optimizers or GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.modules.kinds import ATTENTION_BRANCH, FEED_FORWARD_BRANCH, ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.lowering import covers_layers, operations
from analyzer.program.operations import Operation, OperationKind, Role, with_paths

NO_BYTES: Final = -(1 << 62)
"""Below every figure: the maximum of no instants."""


class Instant(NamedTuple):
    """A module runs. Bytes are relative to those before the block's forward."""

    number: int
    """Of the modules that run in this pass, from 0."""
    kind: ModuleKind
    backward: bool
    saved: int
    """Saved for backward at that instant, with `left`."""
    temporary: int
    """Allocated beside what is saved."""
    left: int = 0
    """Of `saved`, what checkpoints inside the block left behind in this backward."""
    shares_leftover: bool = False
    """The gradient that the checkpoint after this block left is counted in this block's workspace."""
    past_branch: bool = False
    """In backward: the last branch of the last layer is over."""

    @property
    def bytes(self) -> int:
        """Everything allocated."""
        return self.saved + self.temporary


class Peaks(NamedTuple):
    """Highest instants of one pass of a block, for each combination of what may be added to them from outside."""

    plain: int
    past: int
    """Of those with `past_branch`."""
    sharing: int
    """Of those with `shares_leftover`."""
    sharing_past: int


@dataclass(frozen=True)
class BlockMemory:
    """Memory of one block."""

    retained: int
    """Bytes that stay from its forward until its backward."""
    forward: tuple[Instant, ...]
    backward: tuple[Instant, ...]
    frame: tuple[Tensor, ...]
    """Kept alive from its forward until the forward of the chunk returns."""
    forward_peak: int
    backward_peaks: Peaks
    backward_peaks_without_left: Peaks
    """The same of bytes less `left`."""
    left: int
    """Bytes that its checkpoints leave behind after its backward."""
    left_by_last: int | None
    """Of the checkpoint that ran last in backward; None without any."""
    left_gradient: int | None
    """Of these, the gradient that the block before counts as its residual gradient; None without checkpoints that leave any."""
    left_input: int
    """Bytes of the input of that checkpoint where the pipeline schedule may reference it too."""


def block_memory(module: Module) -> BlockMemory:
    """The memory of a module's operations, computed once for each module object."""
    return module.derived(_folded)


def explained(module: Module, instant: Instant) -> tuple[str, tuple[Tensor, ...]]:
    """The path of the module that runs at an instant of a block, from the block on, and the temporary tensors."""
    return module.derived(_explained, instant.number, instant.backward)


def _explained(module: Module, asked: int, backward: bool) -> tuple[str, tuple[Tensor, ...]]:
    program = operations(module)
    tensors = _Tensors()
    number = -1
    for path, operation in with_paths(program.backward if backward else program.forward):
        if operation.kind is OperationKind.COMPUTE:
            number += 1
            if number == asked:
                return path, tensors.listed()
        else:
            tensors.take(operation)
    raise ValueError(f"{module.name} has no instant {asked}")


def _folded(module: Module) -> BlockMemory:
    program = operations(module)
    forward = _Forward()
    for operation in program.forward:
        forward.take(operation)
    backward = _Backward(module.retained_bytes)
    for operation in program.backward:
        backward.take(operation)
    return BlockMemory(
        retained=module.retained_bytes,
        forward=tuple(forward.instants),
        backward=tuple(backward.instants),
        frame=_frame(program.forward),
        forward_peak=max((instant.bytes for instant in forward.instants), default=NO_BYTES),
        backward_peaks=_peaks(backward.instants, without_left=False),
        backward_peaks_without_left=_peaks(backward.instants, without_left=True),
        left=backward.left,
        left_by_last=backward.left_by_last,
        left_gradient=backward.gradient,
        left_input=backward.left_input,
    )


def _frame(forward: Sequence[Operation]) -> tuple[Tensor, ...]:
    """Tensors that local variables reference when the block's forward is over."""
    frames = [each.tensors for each in forward if each.role is Role.FRAME and each.kind is OperationKind.ALLOCATE]
    return tuple(tensor for frame in frames for tensor in frame)


def _peaks(instants: Sequence[Instant], *, without_left: bool) -> Peaks:
    highest = [NO_BYTES] * 4
    for instant in instants:
        which = 2 * instant.shares_leftover + instant.past_branch
        highest[which] = max(highest[which], instant.bytes - (instant.left if without_left else 0))
    return Peaks(*highest)


class _Forward:
    """The state of a fold over operations, in bytes."""

    def __init__(self) -> None:
        self.instants: list[Instant] = []
        self.saved = 0
        self.temporary = 0

    def take(self, operation: Operation) -> None:
        kind = operation.kind
        if kind is OperationKind.ALLOCATE:
            self.allocate(operation)
        elif kind is OperationKind.FREE:
            self.free(operation)
        elif kind is OperationKind.COMPUTE:
            self.compute(operation)

    def allocate(self, operation: Operation) -> None:
        role = operation.role
        if role is Role.SAVED:
            self.saved += operation.bytes
        elif role is not Role.DISCARDED or not operation.module.children:
            # what a container would save is allocated by its children, or by the module before it
            self.temporary += operation.bytes

    def free(self, operation: Operation) -> None:
        role = operation.role
        if role is Role.SAVED:
            self.saved -= operation.bytes
        elif role is not Role.DISCARDED or not operation.module.children:
            self.temporary -= operation.bytes

    def compute(self, operation: Operation) -> None:
        self.instants.append(Instant(len(self.instants), operation.module.kind, False, self.saved, self.temporary))


class _Backward(_Forward):
    """The same in backward, which starts from everything that the forward saved, and counts what checkpoints leave behind."""

    def __init__(self, retained: int) -> None:
        super().__init__()
        self.saved = retained
        self.left = 0
        self.left_by_last: int | None = None
        self.left_input = 0
        self.gradient: int | None = None
        """Bytes of the gradient that the last checkpoint left; None before the first."""
        self._shared = 0
        self._shares_from_outside = False
        self._past = False
        self._inside: Module | None = None
        """The checkpoint around layers that runs backward."""

    def allocate(self, operation: Operation) -> None:
        if operation.role is Role.LEFTOVER:
            self._leave(operation.module)
        elif operation.role is Role.RESIDUAL_SUM:
            self._past = True
            if self._inside is not None:
                self._share_no_more()
        else:
            super().allocate(operation)

    def free(self, operation: Operation) -> None:
        if operation.role is not Role.LEFTOVER:
            super().free(operation)
            return
        self._shares_from_outside = self.gradient is None
        self._shared, self.gradient = self.gradient or 0, 0
        self.left -= self._shared
        self._inside = operation.module if covers_layers(operation.module) else None

    def _share_no_more(self) -> None:
        self.left += self._shared
        self._shared, self._shares_from_outside = 0, False

    def _leave(self, module: Module) -> None:
        self._share_no_more()
        lingering = total_bytes(tensor for tensor in module.saved if tensor.lingers)
        gradient = total_bytes(module.outlives)
        self.left_by_last = gradient + lingering
        self.left += self.left_by_last
        around_layers = covers_layers(module)
        self.left_input = 0 if lingering or not around_layers else total_bytes(module.saved)
        self.gradient = gradient if around_layers else 0
        self._inside = None

    def compute(self, operation: Operation) -> None:
        self.instants.append(
            Instant(
                len(self.instants),
                operation.module.kind,
                True,
                self.saved + self.left,
                self.temporary,
                self.left,
                self._shares_from_outside,
                self._past,
            )
        )


class _Tensors:
    """The temporary tensors of a fold, for explanations."""

    def __init__(self) -> None:
        self._workspaces: list[tuple[Tensor, ...]] = []
        self._frame: list[Tensor] = []
        self._transfer: tuple[Tensor, ...] = ()
        self._discarded: tuple[Tensor, ...] = ()

    def take(self, operation: Operation) -> None:
        allocates, role, tensors = operation.kind is OperationKind.ALLOCATE, operation.role, operation.tensors
        if role is Role.WORKSPACE:
            if allocates:
                self._workspaces.append(tensors)
            else:
                self._workspaces.pop()
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
        """Everything allocated that is not saved, of the innermost module first."""
        around = [tensor for tensors in reversed(self._workspaces) for tensor in tensors]
        return (*self._discarded, *self._transfer, *around, *self._frame)


def branch_of(path: str, layer: Module) -> ModuleKind | None:
    """ATTENTION or FEED_FORWARD: the branch of a layer that a path in its block belongs to; None outside both."""
    names = _branch_names(layer)
    for name in path.split("."):
        if name in names:
            return names[name]
    return None


def _branch_names(layer: Module) -> dict[str, ModuleKind]:
    """The branch of every direct child of a transformer layer at or below `layer`, by the name of the child."""
    names: dict[str, ModuleKind] = {}
    for _, module in layer.walk():
        if module.kind is ModuleKind.LAYER:
            names |= _names_of(module.children, ATTENTION_BRANCH, ModuleKind.ATTENTION)
            names |= _names_of(module.children, FEED_FORWARD_BRANCH, ModuleKind.FEED_FORWARD)
    return names


def _names_of(children: Iterable[Module], kinds: frozenset[ModuleKind], branch: ModuleKind) -> dict[str, ModuleKind]:
    return {child.name: branch for child in children if child.kind in kinds}
