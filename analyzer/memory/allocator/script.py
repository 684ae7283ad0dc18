"""The allocator requests of a chunk's forward and backward, for its large tensors.

The order is that of `program`. Within a module, what it saves is allocated before its temporary tensors, and these live while it
runs. What a checkpoint discards in its first forward is freed when that forward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.memory.allocator.caching_allocator import SMALL_SIZE
from analyzer.modules.tree import Module, Tensor
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role

Action = tuple[int, int, tuple[int, ...]]
"""(bytes, slot, ()): allocate; (0, slot, ()): free; (0, -1, sizes): allocate and free temporary tensors."""
TEMPORARY: Final = -1


@dataclass(frozen=True)
class Script:
    """The requests for one microbatch. Slots number the blocks that are allocated."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    release: tuple[Action, ...]
    """Frees what the forward saved, and nothing else."""
    slots: int
    requests: int
    """Allocations and frees of forward and backward."""


def script(tree: Module) -> Script:
    """The requests of a chunk, computed once for each tree."""
    return tree.derived(_script)


def _script(tree: Module) -> Script:
    blocks = chunk_program(tree).blocks
    forward: list[Action] = []
    release: list[Action] = []
    backward: list[Action] = []
    slots = 0
    placed: list[tuple[Script, int]] = []
    for block in blocks:
        once = block.module.derived(_block_script)
        for _ in range(block.times):
            forward += _moved(once.forward, slots)
            release += _moved(once.release, slots)
            placed.append((once, slots))
            slots += once.slots
    for once, first in reversed(placed):
        backward += _moved(once.backward, first)
    return Script(tuple(forward), tuple(backward), tuple(release), slots, sum(once.requests for once, _ in placed))


def _moved(actions: Sequence[Action], first: int) -> Sequence[Action]:
    """The actions with slots counted from `first`."""
    if not first:
        return actions
    return [(size, slot if slot == TEMPORARY else slot + first, sizes) for size, slot, sizes in actions]


def _block_script(module: Module) -> Script:
    program = operations(module)
    writer = _Writer()
    for operation in program.forward:
        writer.take(operation)
    forward, writer.actions = _with_temporaries(writer.actions), []
    release = tuple((0, slot, ()) for slots in writer.saved_in_order for slot in slots)
    for operation in program.backward:
        writer.take(operation)
    return Script(forward, _with_temporaries(writer.actions), release, writer.slots, writer.requests)


class _Writer:
    """Turns operations into actions."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.slots = 0
        self.requests = 0
        self.saved_in_order: list[list[int]] = []
        """Slots of what the forward saves, in the order of their allocation."""
        self._saved: dict[int, list[list[int]]] = {}
        """For each module object, the slots of its saved tensors; if it is repeated, those of its last run are at the end."""
        self._workspaces: list[list[int]] = []
        self._discarded: list[list[int]] = []
        """Slots of tensors that are discarded in the first forward of a checkpoint."""
        self._checkpoints: list[int] = []
        """For each checkpoint that runs, the number of entries in `_discarded` when it began."""

    def take(self, operation: Operation) -> None:
        role = operation.role
        if operation.kind is OperationKind.BEGIN:
            if operation.module.recomputed and operation.phase != "backward":
                self._checkpoints.append(len(self._discarded))
        elif operation.kind is OperationKind.ALLOCATE:
            if role is Role.SAVED:
                slots = self._allocate(operation.tensors)
                self._saved.setdefault(id(operation.module), []).append(slots)
                if operation.phase == "forward":
                    self.saved_in_order.append(slots)
            elif role is Role.WORKSPACE:
                self._workspaces.append(self._allocate(operation.tensors))
            elif role is Role.DISCARDED:
                self._discarded.append(self._allocate(operation.tensors))
                if operation.module.recomputed:  # a checkpoint in another one: what it would save is not inside it
                    self._checkpoints[-1] = len(self._discarded)
        elif operation.kind is OperationKind.FREE:
            if role is Role.SAVED:
                self._free(self._saved[id(operation.module)].pop())
            elif role is Role.WORKSPACE:
                self._free(self._workspaces.pop())
            elif role is Role.DISCARDED and not operation.tensors:
                self._end_first_forward()

    def _end_first_forward(self) -> None:
        """Frees what was discarded in a checkpoint."""
        first = self._checkpoints.pop()
        for slots in self._discarded[first:]:
            self._free(slots)
        del self._discarded[first:]

    def _allocate(self, tensors: Sequence[Tensor]) -> list[int]:
        made = []
        for size in (tensor.bytes // tensor.pieces for tensor in tensors for _ in range(tensor.pieces)):
            if size > SMALL_SIZE:
                self.actions.append((size, self.slots, ()))
                made.append(self.slots)
                self.slots += 1
        self.requests += len(made)
        return made

    def _free(self, slots: Sequence[int]) -> None:
        self.actions += [(0, slot, ()) for slot in slots]
        self.requests += len(slots)


def _with_temporaries(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The actions with allocations that are freed at once, in the same order, put together."""
    found: list[Action] = []
    place = 0
    while place < len(actions):
        count = _temporaries_at(actions, place)
        if count:
            found.append((0, TEMPORARY, tuple(size for size, _, _ in actions[place : place + count])))
            place += 2 * count
        else:
            found.append(actions[place])
            place += 1
    return tuple(found)


def _temporaries_at(actions: Sequence[Action], place: int) -> int:
    """How many allocations from `place` on are followed by their frees in the same order; 0 if they are not."""
    count = 0
    while place + count < len(actions) and actions[place + count][0]:
        count += 1
    allocated = [slot for _, slot, _ in actions[place : place + count]]
    freed = [slot for size, slot, _ in actions[place + count : place + 2 * count] if not size]
    return count if allocated == freed else 0
