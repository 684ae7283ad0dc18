"""The allocator requests of a chunk's forward and backward, for its large tensors.

The order is that of `program`. A module allocates its saved tensors before its temporary tensors, and frees the temporary tensors
when it ends. Tensors that a checkpoint discards are freed at the end of its first forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, Temporaries
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role

Action = tuple[int, int, Temporaries]
"""(bytes, slot, NONE) allocates, (-bytes, slot, NONE) allocates on the second stream, (0, slot, NONE) frees, and
(0, TEMPORARY, tensors) allocates and frees temporary tensors.
"""
NONE: Final = Temporaries((), 0, 0, False)
TEMPORARY: Final = -1


Place = tuple[int, ModuleKind]
"""The index of an action, before which a module of this kind runs."""


@dataclass(frozen=True)
class Script:
    """The requests for one microbatch. Slots are the indices of allocated blocks."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    forward_places: tuple[Place, ...]
    """Where the modules of each kind run for the first time, in order."""
    backward_places: tuple[Place, ...]
    release: tuple[Action, ...]
    """Frees the tensors that the forward saved, without a backward."""
    slots: int
    requests: int
    """Number of allocations and frees in forward and backward."""


def script(tree: Module) -> Script:
    """The requests of a chunk, cached per tree."""
    return tree.derived(_script)


def _script(tree: Module) -> Script:
    blocks = chunk_program(tree).blocks
    forward: list[Action] = []
    release: list[Action] = []
    backward: list[Action] = []
    slots = 0
    placed: list[tuple[Script, int]] = []
    forward_places: dict[ModuleKind, int] = {}
    backward_places: dict[ModuleKind, int] = {}
    for block in blocks:
        once = block.module.derived(_block_script)
        _add_places(forward_places, once.forward_places, len(forward))
        for _ in range(block.times):
            forward += _with_slot_offset(once.forward, slots)
            release += _with_slot_offset(once.release, slots)
            placed.append((once, slots))
            slots += once.slots
    for once, first in reversed(placed):
        _add_places(backward_places, once.backward_places, len(backward))
        backward += _with_slot_offset(once.backward, first)
    return Script(
        forward=tuple(forward),
        backward=tuple(backward),
        forward_places=tuple((index, kind) for kind, index in forward_places.items()),
        backward_places=tuple((index, kind) for kind, index in backward_places.items()),
        release=tuple(release),
        slots=slots,
        requests=sum(once.requests for once, _ in placed),
    )


def _add_places(found: dict[ModuleKind, int], places: Iterable[Place], first: int) -> None:
    """Adds the places of kinds that are not in `found`, with `first` added to their indices."""
    for index, kind in places:
        if kind not in found:
            found[kind] = first + index


def _with_slot_offset(actions: Sequence[Action], first: int) -> Sequence[Action]:
    """The actions with `first` added to their slots."""
    if not first:
        return actions
    return [(size, slot if slot == TEMPORARY else slot + first, temporaries) for size, slot, temporaries in actions]


def _block_script(module: Module) -> Script:
    program = operations(module)
    writer = _Writer()
    for operation in program.forward:
        writer.apply(operation)
    forward, forward_places = writer.take()
    release = tuple((0, slot, NONE) for slots in writer.saved_in_order for slot in slots)
    for operation in program.backward:
        writer.apply(operation)
    backward, backward_places = writer.take()
    return Script(forward, backward, forward_places, backward_places, release, writer.slots, writer.requests)


class _Writer:
    """Turns operations into actions."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.places: dict[ModuleKind, int] = {}
        """For each kind of module, the number of actions before one of this kind first ran."""
        self.slots = 0
        self.requests = 0
        self.saved_in_order: list[list[int]] = []
        """Slots of the tensors that the forward saves, in the order of their allocation."""
        self._saved: dict[int, list[list[int]]] = {}
        """For each module object, the slots of its saved tensors, one list per run."""
        self._workspaces: list[list[int]] = []
        self._discarded: list[list[int]] = []
        """Slots of tensors that are discarded in the first forward of a checkpoint."""
        self._checkpoints: list[int] = []
        """For each running checkpoint, the number of entries in `_discarded` at its start."""

    def take(self) -> tuple[tuple[Action, ...], tuple[Place, ...]]:
        """The actions so far, with temporary tensors combined, and the places of the modules. Both start again."""
        actions, places = _with_temporaries(self.actions, self.places)
        self.actions, self.places = [], {}
        return actions, places

    def apply(self, operation: Operation) -> None:
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
                if operation.module.recomputed:  # a nested checkpoint: the enclosing one discards its saved tensors
                    self._checkpoints[-1] = len(self._discarded)
        elif operation.kind is OperationKind.FREE:
            if role is Role.SAVED:
                self._free(self._saved[id(operation.module)].pop())
            elif role is Role.WORKSPACE:
                self._free(self._workspaces.pop())
            elif role is Role.DISCARDED and not operation.tensors:
                self._end_first_forward()
        elif operation.kind is OperationKind.COMPUTE:
            self.places.setdefault(operation.module.kind, len(self.actions))

    def _end_first_forward(self) -> None:
        """Frees the tensors that a checkpoint discards."""
        first = self._checkpoints.pop()
        for slots in self._discarded[first:]:
            self._free(slots)
        del self._discarded[first:]

    def _allocate(self, tensors: Sequence[Tensor]) -> list[int]:
        slots = []
        for tensor in tensors:
            size = tensor.bytes // tensor.pieces
            if size <= SMALL_SIZE:
                continue
            for _ in range(tensor.pieces):
                self.actions.append((-size if tensor.side_stream else size, self.slots, NONE))
                slots.append(self.slots)
                self.slots += 1
        self.requests += len(slots)
        return slots

    def _free(self, slots: Sequence[int]) -> None:
        self.actions += [(0, slot, NONE) for slot in slots]
        self.requests += len(slots)


def _with_temporaries(actions: Sequence[Action], places: Mapping[ModuleKind, int]) -> tuple[tuple[Action, ...], tuple[Place, ...]]:
    """The actions, with allocations that are immediately freed in the same order combined into one action, and the places."""
    found: list[Action] = []
    found_places: list[Place] = []
    remaining = list(places.items())[::-1]
    index = 0
    while index < len(actions):
        count = _temporaries_at(actions, index)
        while remaining and remaining[-1][1] < index + max(1, 2 * count):  # a module among combined actions runs before them
            found_places.append((len(found), remaining.pop()[0]))
        if count:
            found.append((0, TEMPORARY, Temporaries.of(size for size, _, _ in actions[index : index + count])))
            index += 2 * count
        else:
            found.append(actions[index])
            index += 1
    found_places += [(len(found), kind) for kind, _ in reversed(remaining)]
    return tuple(found), tuple(found_places)


def _temporaries_at(actions: Sequence[Action], index: int) -> int:
    """The number of allocations from index `index` that are followed by their frees in the same order; 0 if there are none."""
    count = 0
    while index + count < len(actions) and actions[index + count][0]:
        count += 1
    allocated = [slot for _, slot, _ in actions[index : index + count]]
    freed = [slot for size, slot, _ in actions[index + count : index + 2 * count] if not size]
    return count if allocated == freed else 0
