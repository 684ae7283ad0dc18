"""An instant of a chunk, with all memory that is allocated outside its block."""

from __future__ import annotations

from typing import NamedTuple

from analyzer.memory.block_memory import Instant, explained
from analyzer.modules.tree import Module, Tensor, total_bytes


class Point(NamedTuple):
    """An instant of a chunk, in bytes above the memory before the chunk's forward."""

    block: Module
    """The module whose operations form the block of the instant."""
    parent: str
    """Dotted path of the module that contains the block; empty for the root."""
    instant: Instant
    saved: int
    """Saved for backward, or referenced by attributes of modules."""
    bytes: int
    """All allocated bytes."""
    outside: tuple[Tensor, ...] = ()
    """Tensors from outside the block, in addition to `saved`."""

    @property
    def path(self) -> str:
        """Dotted path of the module that runs."""
        path, _ = explained(self.block, self.instant)
        return f"{self.parent}.{path}" if self.parent else path

    @property
    def transient(self) -> tuple[Tensor, ...]:
        """All allocated tensors that are not saved for backward."""
        _, tensors = explained(self.block, self.instant)
        return (*tensors, *self.outside)


class Exchange(NamedTuple):
    """The instant after a forward at which its output is sent, and the gradient for the next backward is received."""

    saved: int
    """Saved for backward."""
    outside: tuple[Tensor, ...]
    """The messages."""

    @property
    def bytes(self) -> int:
        """All allocated bytes."""
        return self.saved + total_bytes(self.outside)

    @property
    def path(self) -> str:
        """The messages instead of a module."""
        return ".messages to and from the next stage"

    @property
    def transient(self) -> tuple[Tensor, ...]:
        """The messages."""
        return self.outside
