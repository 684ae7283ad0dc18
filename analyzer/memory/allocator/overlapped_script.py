"""The allocator requests of a forward that overlaps with the backward of another microbatch.

`memory.overlapped` gives the instants of such a step in order, each with the tensors that nodes and dispatchers hold. Between two
instants, the microbatch of the later one runs its requests up to that instant, and what is held changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from analyzer.memory.allocator.script import Action, Streams, Writer, block_script, with_slot_offset
from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_instants
from analyzer.memory.point import Point
from analyzer.modules.tree import Module, Tensor
from analyzer.program.chunks import chunk_program
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind, Role
from analyzer.program.schedule.pipeline import Pair

FORWARD, BACKWARD, HELD = range(3)
NO_MODULE: Final = -1
"""`_Slice.number` of requests after the last module of a pass."""


class _Slice(NamedTuple):
    """The requests of a block up to the end of a module."""

    block: Module
    number: int
    """Index of the module among those that run in the pass."""
    actions: tuple[Action, ...]


Part = tuple[int, Sequence[Action], tuple[Tensor, ...]]
"""`FORWARD` or `BACKWARD` with requests of that microbatch, or `HELD` with the tensors that are held from here on."""


def overlapped_script(trees: Sequence[Module], pair: Pair, rules: GradientRules, *, streams: Streams) -> tuple[Part, ...]:
    """The requests of an overlapped step."""
    sides = (
        _Side(trees[pair.forward].derived(_forward_slices, streams)),
        _Side(trees[pair.backward].derived(_backward_slices, streams)),
    )
    # what local variables reference is not requested, as in `script`
    frame = {id(tensor) for tree in trees for tensor in tree.derived(_frame)}
    parts: list[Part] = []
    held: tuple[Tensor, ...] = ()
    for point in overlapped_instants(trees, pair, rules):
        which = BACKWARD if point.instant.backward else FORWARD
        now = tuple(each for each in point.outside if each.bytes and id(each) not in frame)
        if now != held:
            parts.append((HELD, (), now))
            held = now
        actions = sides[which].up_to(point)
        if actions:
            parts.append((which, actions, ()))
    parts += [(which, sides[which].rest(), ()) for which in (BACKWARD, FORWARD)]
    parts.append((HELD, (), ()))
    return tuple(parts)


class _Side:
    """The requests of one of the two microbatches."""

    def __init__(self, slices: Sequence[_Slice]) -> None:
        self._slices = slices
        self._done = 0

    def up_to(self, point: Point) -> Sequence[Action]:
        """The requests that have not run, up to an instant; empty if it is over."""
        for index in range(self._done, len(self._slices)):
            if self._slices[index].block is point.block and self._slices[index].number == point.instant.number:
                return self._take(index + 1)
        return ()

    def rest(self) -> Sequence[Action]:
        """All remaining requests."""
        return self._take(len(self._slices))

    def _take(self, end: int) -> Sequence[Action]:
        found = [action for each in self._slices[self._done : end] for action in each.actions]
        self._done = end
        return found


def _frame(tree: Module) -> tuple[Tensor, ...]:
    """The tensors that local variables reference until a forward returns."""
    blocks = {id(block.module): block.module for block in chunk_program(tree).blocks}.values()
    return tuple(
        tensor
        for module in blocks
        for operation in operations(module).forward
        if operation.role is Role.FRAME
        for tensor in operation.tensors
    )


def _forward_slices(tree: Module, streams: Streams) -> tuple[_Slice, ...]:
    """The requests of a chunk's forward."""
    placed = [(module.derived(_block_slices, streams), first) for module, first in _placed(tree, streams)]
    return tuple(_moved(each, first) for (forward, _), first in placed for each in forward)


def _backward_slices(tree: Module, streams: Streams) -> tuple[_Slice, ...]:
    """The requests of a chunk's backward."""
    placed = [(module.derived(_block_slices, streams), first) for module, first in _placed(tree, streams)]
    return tuple(_moved(each, first) for (_, backward), first in reversed(placed) for each in backward)


def _placed(tree: Module, streams: Streams) -> Iterator[tuple[Module, int]]:
    """Each block of a chunk, with the number of its first slot as in the script of the chunk."""
    slots = 0
    for block in chunk_program(tree).blocks:
        for _ in range(block.times):
            yield block.module, slots
            slots += block_script(block.module, streams).slots


def _moved(each: _Slice, first: int) -> _Slice:
    return each._replace(actions=tuple(with_slot_offset(each.actions, first)))


def _block_slices(block: Module, streams: Streams) -> tuple[tuple[_Slice, ...], tuple[_Slice, ...]]:
    """The requests of a block's forward and backward."""
    program, writer = operations(block), Writer(streams)
    forward = tuple(_slices(block, writer, program.forward))
    writer.start_backward(block)
    backward = tuple(_slices(block, writer, program.backward))
    return forward, backward


def _slices(block: Module, writer: Writer, listed: Sequence[Operation]) -> Iterator[_Slice]:
    """The requests of a pass. The requests after a module that only free tensors belong to it."""
    number, ran = -1, False
    for operation in listed:
        if ran and operation.kind not in (OperationKind.FREE, OperationKind.END):
            yield _Slice(block, number, writer.take_all())
            ran = False
        writer.apply(operation)
        if operation.kind is OperationKind.COMPUTE:
            number, ran = number + 1, True
    if operation.phase == "backward":
        writer.end_backward()
    yield _Slice(block, number if ran else NO_MODULE, writer.take_all())
