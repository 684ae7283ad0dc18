"""Instants of the blocks of a chunk, with all memory that is allocated outside their block."""

from __future__ import annotations

from typing import NamedTuple

from analyzer.memory.block_memory import BlockMemory, Instant, explained
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import Block


class Point(NamedTuple):
    """An instant of a chunk, in bytes above the memory before the chunk's forward."""

    block: Module
    """The module whose operations form the block of the instant."""
    parent: str
    """Dotted path of the module that contains the block; empty for the root."""
    instant: Instant
    saved: int
    """Saved for backward."""
    bytes: int
    """All allocated bytes."""
    leftover: int = 0
    """The part of `saved` that checkpoints did not free in this backward."""
    outside: tuple[Tensor, ...] = ()
    """Tensors from outside the block, in addition to `saved`."""
    lingering: int = 0
    """In backward: bytes in addition to `bytes` that module attributes still reference if no other microbatch is in flight."""

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


class Exchange(Point):
    """The instant after a forward at which its output is sent, and the gradient for the next backward is received."""

    @property
    def path(self) -> str:
        """The messages instead of a module."""
        return ".messages to and from the next stage"

    @property
    def transient(self) -> tuple[Tensor, ...]:
        """The messages."""
        return self.outside


class Placement(NamedTuple):
    """One repetition of a block in a chunk."""

    block: Block
    memory: BlockMemory
    before: int
    """Bytes saved by earlier modules of the chunk."""
    leftover: int = 0
    """In backward: bytes that checkpoints of later modules did not free."""
    shared: int = 0
    """The part of `leftover` that the workspace of this block may already include: a gradient."""
    branch: bool = False
    """In backward: the received gradient is added to the instants of this block that have `Instant.past_branch`."""
    past: bool = False
    """In backward: the last branch of the chunk's last layer has finished."""
    held: tuple[Tensor, ...] = ()
    """In backward: the gradient that the arguments of a checkpoint's backward reference, at instants with `Instant.past_branch`."""
    lingering: int = 0
    """In backward: `BlockMemory.lingering` of later modules."""
    waiting: tuple[Tensor, ...] = ()
    """In backward: the gradient of a tied embedding that the output layer has computed."""


def from_outside(placement: Placement, instant: Instant, gradient: int) -> int:
    """Bytes from outside the block that differ between the instants of its backward."""
    shared = placement.shared if instant.shares_leftover else 0
    held = total_bytes(placement.held) if instant.past_branch else 0
    return (gradient if _counts_received(placement, instant) else 0) + held - shared


def _counts_received(placement: Placement, instant: Instant) -> bool:
    """Whether the received gradient is allocated in addition to what the block counts."""
    return placement.past or (placement.branch and instant.past_branch)


def placed(placement: Placement, instant: Instant, *, outside: tuple[Tensor, ...]) -> Point:
    """An instant with all memory that is allocated outside its block."""
    leftover = instant.leftover + placement.leftover - (placement.shared if instant.shares_leftover else 0)
    saved = placement.before + instant.saved - instant.leftover + leftover
    if instant.backward and not _counts_received(placement, instant):
        outside = ()
    if instant.backward and instant.past_branch:
        outside += placement.held
    outside += placement.waiting
    return Point(
        block=placement.block.module,
        parent=placement.block.parent,
        instant=instant,
        saved=saved,
        bytes=saved + instant.temporary + total_bytes(outside),
        leftover=leftover,
        outside=outside,
        lingering=placement.lingering + instant.lingering,
    )
