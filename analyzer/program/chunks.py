"""The program of a model chunk: blocks of operations, equal layers in a row as one block with a count.

A pipeline stage may have thousands of equal layers. What reads a program does so once for a block and its count, or in full with
`expanded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation
from analyzer.schedule.pipeline import Step


class Block(NamedTuple):
    """Modules in a row that are one object: the same operations `times` times."""

    module: Module
    parent: str
    """Dotted path of the enclosing module; empty for the root."""
    times: int


class ChunkProgram(NamedTuple):
    """The blocks of a chunk in the order of its forward; the backward has the opposite order."""

    tree: Module
    blocks: tuple[Block, ...]

    def expanded(self, direction: str) -> Iterator[Operation]:
        """Every operation of the "forward" or the "backward", repeated blocks in full. Paths start at the root of the tree."""
        forward = direction == "forward"
        for block in self.blocks if forward else reversed(self.blocks):
            program = operations(block.module)
            once = program.forward if forward else program.backward
            placed = [each._replace(path=f"{block.parent}.{each.path}" if block.parent else each.path) for each in once]
            for _ in range(block.times):
                yield from placed


def chunk_program(tree: Module) -> ChunkProgram:
    """The program of a chunk, computed once for each tree."""
    return tree.derived(_chunk_program)


def _chunk_program(tree: Module) -> ChunkProgram:
    return ChunkProgram(tree, tuple(_blocks(tree, "")))


def _blocks(module: Module, parent: str) -> Iterator[Block]:
    """The model and its decoder are no blocks, but their children are, unless they have tensors of their own."""
    own = module.saved or module.forward_workspace or module.backward_workspace or module.forward_held or module.recomputed
    if own or not module.children or module.kind not in (ModuleKind.MODEL, ModuleKind.DECODER):
        yield Block(module, parent, 1)
        return
    path = f"{parent}.{module.name}" if parent else module.name
    waiting: Block | None = None
    for child in module.children:
        for block in _blocks(child, path):
            if waiting is not None and waiting.module is block.module:
                waiting = waiting._replace(times=waiting.times + block.times)
                continue
            if waiting is not None:
                yield waiting
            waiting = block
    if waiting is not None:
        yield waiting


def iteration_operations(order: Iterable[Step], programs: Mapping[int, ChunkProgram]) -> Iterator[tuple[Step, Operation]]:
    """Every operation that a pipeline rank executes in an iteration, with the step it belongs to.

    `order` is the schedule of the rank and `programs` the program of each of its chunks. Overlapped steps (`Step.paired`) are
    listed one after the other.
    """
    for step in order:
        for operation in programs[step.chunk].expanded(step.kind):
            yield step, operation
