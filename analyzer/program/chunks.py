"""The program of a model chunk: blocks of operations. Consecutive equal layers are one block with a count.

A pipeline stage may have thousands of equal layers. Code that reads a program handles each block once and uses its count, or reads
all operations with `expanded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, with_paths


class Block(NamedTuple):
    """Consecutive modules that are one object: the same operations, repeated `times` times."""

    module: Module
    parent: str
    """Dotted path of the enclosing module; empty for the root."""
    times: int


class ChunkProgram(NamedTuple):
    """The blocks of a chunk in forward order. The backward runs them in reverse order."""

    tree: Module
    blocks: tuple[Block, ...]

    def expanded(self, direction: str) -> Iterator[tuple[str, Operation]]:
        """Every operation of the "forward" or the "backward" with the path of its module, including all repetitions of blocks."""
        forward = direction == "forward"
        for block in self.blocks if forward else reversed(self.blocks):
            program = operations(block.module)
            block_operations = tuple(with_paths(program.forward if forward else program.backward, block.parent))
            for _ in range(block.times):
                yield from block_operations


def chunk_program(tree: Module) -> ChunkProgram:
    """The program of a chunk, cached per tree."""
    return tree.derived(_chunk_program)


def _chunk_program(tree: Module) -> ChunkProgram:
    return ChunkProgram(tree, tuple(_blocks(tree, "")))


def _blocks(module: Module, parent: str) -> Iterator[Block]:
    """The blocks of a module. The model and its decoder are replaced by their children, unless they have tensors themselves."""
    has_tensors = module.saved or module.forward_workspace or module.backward_workspace or module.forward_held or module.collectives
    if has_tensors or module.recomputed or not module.children or module.kind not in (ModuleKind.MODEL, ModuleKind.DECODER):
        yield Block(module, parent, 1)
        return
    path = f"{parent}.{module.name}" if parent else module.name
    current: Block | None = None
    for child in module.children:
        for block in _blocks(child, path):
            if current is not None and current.module is block.module:
                current = current._replace(times=current.times + block.times)
                continue
            if current is not None:
                yield current
            current = block
    if current is not None:
        yield current
