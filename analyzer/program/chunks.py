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
from analyzer.program.operations import Operation, with_paths
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

    def expanded(self, direction: str) -> Iterator[tuple[str, Operation]]:
        """Every operation of the "forward" or the "backward" with the path of its module, repeated blocks in full."""
        forward = direction == "forward"
        for block in self.blocks if forward else reversed(self.blocks):
            program = operations(block.module)
            placed = tuple(with_paths(program.forward if forward else program.backward, block.parent))
            for _ in range(block.times):
                yield from placed


def chunk_program(tree: Module) -> ChunkProgram:
    """The program of a chunk, computed once for each tree."""
    return tree.derived(_chunk_program)


def _chunk_program(tree: Module) -> ChunkProgram:
    return ChunkProgram(tree, tuple(_blocks(tree, "")))


def _blocks(module: Module, parent: str) -> Iterator[Block]:
    """The model and its decoder are no blocks, but their children are, unless they have tensors of their own."""
    own = module.saved or module.forward_workspace or module.backward_workspace or module.forward_held or module.collectives
    if own or module.recomputed or not module.children or module.kind not in (ModuleKind.MODEL, ModuleKind.DECODER):
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


def iteration_operations(order: Iterable[Step], programs: Mapping[int, ChunkProgram]) -> Iterator[tuple[Step, str, Operation]]:
    """Every operation that a pipeline rank executes in an iteration, with its step and the path of its module.

    `order` is the schedule of the rank and `programs` the program of each of its chunks. Overlapped steps (`Step.paired`) are
    listed one after the other.
    """
    for step in order:
        for path, operation in programs[step.chunk].expanded(step.kind):
            yield step, path, operation
