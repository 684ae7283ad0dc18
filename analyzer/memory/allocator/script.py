"""The allocator requests of a chunk's forward and backward, for its large tensors.

The order is that of `program`. A module allocates its saved tensors before its temporary tensors, and frees the temporary tensors
when it ends. Tensors that a checkpoint discards are freed at the end of its first forward. Tensors that local variables reference
are freed at the end of the chunk's forward, and what is left after a backward at the start of the chunk's next forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, Temporaries
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import SIDE_STREAM, Module, Tensor
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role

Action = tuple[int, int, Temporaries]
"""(request, slot, NONE) allocates, (0, slot, NONE) frees, and (0, TEMPORARY, tensors) allocates and frees temporary tensors.

The request is the number of bytes; for another stream than the first it is negative (`request`).
"""
NONE: Final = Temporaries((), 0, 0, False)
TEMPORARY: Final = -1
STREAM_BITS: Final = 56
"""A request for a stream is minus its bytes, minus the number of streams between that and the second one times 2 to this power."""
Streams = tuple[tuple[str | ModuleKind | Role, int], ...]
"""By roles, kinds of modules, formulas or names of tensors, their streams, if that is not the first; `LEFT_OUT` for no requests.

"" stands for all others. The role is that of tensors that are copied back from the host.
"""
LEFT_OUT: Final = -1
Place = tuple[int, ModuleKind]
"""The index of an action, before which a module of this kind runs."""


class _Held(NamedTuple):
    """An allocated tensor."""

    tensor: Tensor
    slots: range
    """One for each of its pieces; empty if it is small."""


@dataclass(frozen=True)
class Script:
    """The requests for one microbatch in a block. Slots are the indices of allocated blocks."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    forward_places: tuple[Place, ...]
    """Where the modules of each kind run for the first time, in order."""
    backward_places: tuple[Place, ...]
    release: tuple[Action, ...]
    """Frees the tensors that the forward saved, without a backward."""
    leftover: tuple[Action, ...]
    """Frees what is still allocated after the backward."""
    slots: int


def request(size: int, stream: int) -> int:
    """The request of `size` bytes on a stream, as in `Action`."""
    return size if not stream else -size - ((stream - SIDE_STREAM) << STREAM_BITS)


@dataclass(frozen=True)
class ChunkScript:
    """The requests for one microbatch in a chunk, as those of its blocks. Equal layers have one script."""

    blocks: tuple[tuple[Script, int], ...]
    """The script of each block, in the order of the forward, and the slot of the microbatch that is its first one."""
    slots: int

    @property
    def requests(self) -> int:
        """Number of allocations and frees."""
        return 2 * self.slots

    @property
    def forward(self) -> tuple[Action, ...]:
        """The requests of the forward, with the slots of the microbatch."""
        return tuple(action for block, first in self.blocks for action in with_slot_offset(block.forward, first))

    @property
    def backward(self) -> tuple[Action, ...]:
        """Those of the backward."""
        return tuple(action for block, first in reversed(self.blocks) for action in with_slot_offset(block.backward, first))

    @property
    def leftover(self) -> tuple[Action, ...]:
        """Frees what is still allocated after the backward."""
        return tuple(action for block, first in self.blocks for action in with_slot_offset(block.leftover, first))

    @property
    def saved(self) -> list[int]:
        """The slots of the tensors that the forward saved."""
        return [slot + first for block, first in self.blocks for _, slot, _ in block.release]

    @property
    def forward_places(self) -> tuple[Place, ...]:
        """Where the modules of each kind run for the first time in the forward, in order."""
        return _places((block.forward, block.forward_places) for block, _ in self.blocks)

    @property
    def backward_places(self) -> tuple[Place, ...]:
        """Where they run for the first time in the backward."""
        return _places((block.backward, block.backward_places) for block, _ in reversed(self.blocks))


def script(tree: Module, streams: Streams = ()) -> ChunkScript:
    """The requests of a chunk, cached per tree."""
    return tree.derived(_script, streams)


def _script(tree: Module, streams: Streams) -> ChunkScript:
    placed: list[tuple[Script, int]] = []
    slots = 0
    for block in chunk_program(tree).blocks:
        once = block_script(block.module, streams)
        for _ in range(block.times):
            placed.append((once, slots))
            slots += once.slots
    return ChunkScript(tuple(placed), slots)


def _places(passes: Iterable[tuple[Sequence[Action], Iterable[Place]]]) -> tuple[Place, ...]:
    """The first places of the kinds in passes of blocks that run one after another."""
    found: dict[ModuleKind, int] = {}
    first = 0
    for actions, places in passes:
        for index, kind in places:
            found.setdefault(kind, first + index)
        first += len(actions)
    return tuple((index, kind) for kind, index in found.items())


def with_slot_offset(actions: Sequence[Action], first: int) -> Sequence[Action]:
    """The actions with `first` added to their slots."""
    if not first:
        return actions
    return [(size, slot if slot == TEMPORARY else slot + first, temporaries) for size, slot, temporaries in actions]


def block_script(module: Module, streams: Streams = ()) -> Script:
    """The requests of a block, cached per module object."""
    return module.derived(_block_script, streams)


def _block_script(module: Module, streams: Streams) -> Script:
    program = operations(module)
    writer = Writer(streams, module)
    for operation in program.forward:
        writer.apply(operation)
    forward, forward_places = writer.take()
    writer.start_backward(module)
    for operation in program.backward:
        writer.apply(operation)
    writer.end_backward()
    backward, backward_places = writer.take()
    return Script(
        forward=forward,
        backward=backward,
        forward_places=forward_places,
        backward_places=backward_places,
        release=tuple((0, slot, NONE) for slot in writer.saved_in_order),
        leftover=frees(writer.leftover),
        slots=writer.slots,
    )


def _inner_streams(block: Module) -> dict[int, int]:
    """By module object in a block: the stream of all of its tensors, if that is not the default one."""
    return {
        id(inside): outer.inner_stream
        for _, outer in block.walk()
        if outer.inner_stream
        for child in outer.children
        for _, inside in child.walk()
    }


def frees(held: Iterable[_Held]) -> tuple[Action, ...]:
    """The actions that free tensors."""
    return tuple((0, slot, NONE) for _, slots in held for slot in slots)


class Writer:
    """Turns operations into actions. Tensors of at most `SMALL_SIZE` are left out."""

    def __init__(self, streams: Streams = (), block: Module | None = None) -> None:
        """`block`: the module that runs, whose parts may have streams of their own."""
        self.actions: list[Action] = []
        self.places: dict[ModuleKind, int] = {}
        """For each kind of module, the number of actions before one of this kind first ran."""
        self.slots = 0
        self.saved_in_order: list[int] = []
        """Slots of the tensors that the forward saves, in the order of their allocation."""
        self.leftover: list[_Held] = []
        """What is still allocated after the backward."""
        self._streams = dict(streams)
        self._inner = _inner_streams(block) if block is not None else {}
        self._saved: dict[int, list[list[_Held]]] = {}
        """For each module object, its saved tensors, one list per run."""
        self._workspaces: list[list[_Held]] = []
        self._discarded: list[list[_Held]] = []
        """Tensors that are discarded in the first forward of a checkpoint."""
        self._checkpoints: list[int] = []
        """For each running checkpoint, the number of entries in `_discarded` at its start."""
        self._transfer: list[_Held] = []
        self._reloaded: list[_Held] = []

    def take(self) -> tuple[tuple[Action, ...], tuple[Place, ...]]:
        """The actions so far, with temporary tensors combined, and the places of the modules. Both start again."""
        actions, places = _with_temporaries(self.actions, self.places)
        self.actions, self.places = [], {}
        return actions, places

    def take_all(self) -> tuple[Action, ...]:
        """The actions so far, which start again."""
        actions, self.actions = tuple(self.actions), []
        return actions

    def apply(self, operation: Operation) -> None:
        if operation.kind is OperationKind.BEGIN:
            if operation.module.recomputed and operation.phase != "backward":
                self._checkpoints.append(len(self._discarded))
        elif operation.kind is OperationKind.ALLOCATE:
            self._allocate(operation)
        elif operation.kind is OperationKind.FREE:
            self._free(operation)
        elif operation.kind is OperationKind.COMPUTE:
            self.places.setdefault(operation.module.kind, len(self.actions))

    def start_backward(self, module: Module) -> None:
        """Allocates what following layers have copied back from the host for this one."""
        for _, inside in module.walk():
            if inside.reloaded_early:
                self._of_last_run(inside).extend(self._requested(inside, inside.copied_back, Role.RELOADED))

    def end_backward(self) -> None:
        """Frees what is allocated until the backward of the block ends."""
        self._released(self._reloaded)
        self._reloaded = []

    def _of_last_run(self, module: Module) -> list[_Held]:
        runs = self._saved.setdefault(id(module), [])
        if not runs:
            runs.append([])
        return runs[-1]

    def _allocate(self, operation: Operation) -> None:
        role, tensors = operation.role, operation.tensors
        if role in (Role.RESIDUAL_SUM, Role.FRAME, Role.TOGETHER):
            return  # what local variables reference is left out: with it, measured runs agree less well
        copied = role in (Role.RELOADED, Role.TRANSFER) and operation.phase == "backward"
        held = self._requested(operation.module, tensors, Role.RELOADED if copied else Role.NONE)
        if role is Role.SAVED:
            self._saved.setdefault(id(operation.module), []).append(held)
            if operation.phase == "forward":
                self.saved_in_order += [slot for _, slots in held for slot in slots]
        elif role is Role.WORKSPACE:
            self._workspaces.append(held)
        elif role is Role.TRANSFER:
            self._transfer = held
        elif role is Role.DISCARDED:
            self._discarded.append(held)
            if operation.module.recomputed:  # a nested checkpoint: the enclosing one discards its saved tensors
                self._checkpoints[-1] = len(self._discarded)
        else:
            {Role.RELOADED: self._reloaded, Role.LEFTOVER: self.leftover}[role].extend(held)

    def _free(self, operation: Operation) -> None:
        role, tensors = operation.role, operation.tensors
        if role is Role.SAVED:
            runs = self._saved[id(operation.module)]
            self._released(_removed(runs[-1], tensors))
            if not runs[-1]:
                runs.pop()
        elif role is Role.WORKSPACE:
            self._released(self._workspaces.pop())
        elif role is Role.TRANSFER:
            self._released(_removed(self._transfer, tensors))
        elif role is Role.RELOADED:
            self._released(_removed(self._reloaded, tensors))
        elif role is Role.DISCARDED and not tensors:
            self._end_first_forward()
        # what checkpoints recompute together is replayed as if it stayed

    def _end_first_forward(self) -> None:
        """Frees the tensors that a checkpoint discards."""
        first = self._checkpoints.pop()
        for held in self._discarded[first:]:
            self._released(held)
        del self._discarded[first:]

    def _requested(self, module: Module, tensors: Iterable[Tensor], role: Role) -> list[_Held]:
        """Allocates tensors. Small ones have no slots."""
        found = []
        for tensor in tensors:
            first = self.slots
            size = tensor.bytes // tensor.pieces
            if size > SMALL_SIZE:
                stream = self._inner.get(id(module), 0) or tensor.stream
                if self._streams:
                    stream = self._stream(module, tensor, role, stream)
                for _ in range(tensor.pieces if stream != LEFT_OUT else 0):
                    self.actions.append((request(size, stream), self.slots, NONE))
                    self.slots += 1
            found.append(_Held(tensor, range(first, self.slots)))
        return found

    def _stream(self, module: Module, tensor: Tensor, role: Role, stream: int) -> int:
        """The stream of a job in which some tensors have others than `stream`."""
        found = (self._streams.get(each) for each in (role, module.kind, tensor.formula, tensor.name, ""))
        return next((each for each in found if each is not None), stream)

    def _released(self, held: Iterable[_Held]) -> None:
        """Frees tensors."""
        self.actions += frees(held)


def _removed(held: list[_Held], tensors: Sequence[Tensor]) -> list[_Held]:
    """Removes these tensors from `held` and returns them. Those that are not in it are left out."""
    if len(held) == len(tensors):
        found, held[:] = list(held), []
        return found
    found = []
    for tensor in tensors:
        place = next((index for index, each in enumerate(held) if each.tensor == tensor), None)
        if place is not None:
            found.append(held.pop(place))
    return found


def _with_temporaries(actions: Sequence[Action], places: Mapping[ModuleKind, int]) -> tuple[tuple[Action, ...], tuple[Place, ...]]:
    """The actions, with allocations that are immediately freed in the same order combined into one action, and the places."""
    found: list[Action] = []
    found_places: list[Place] = []
    remaining = list(places.items())[::-1]
    ends = _ends_of_runs(actions)
    index = 0
    while index < len(actions):
        count = _temporaries_at(actions, index, ends[index])
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


def _temporaries_at(actions: Sequence[Action], index: int, end: int) -> int:
    """The number of allocations from `index` to `end` if their frees follow in the same order; 0 if not."""
    if end == len(actions) or actions[end][0] or actions[end][1] != actions[index][1]:
        return 0
    count = end - index
    allocated = [slot for _, slot, _ in actions[index:end]]
    freed = [slot for size, slot, _ in actions[end : end + count] if not size]
    return count if allocated == freed else 0


def _ends_of_runs(actions: Sequence[Action]) -> list[int]:
    """For each action, the index of the first one from it on that is not an allocation which `Temporaries` can have."""
    ends = [len(actions)] * len(actions)
    end = len(actions)
    for index in range(len(actions) - 1, -1, -1):
        if not _combined(actions[index][0]):
            end = index
        ends[index] = end
    return ends


def _combined(size: int) -> bool:
    """Whether `Temporaries` can have a request: it is on the first or second stream."""
    return bool(size) and -size < 1 << STREAM_BITS
