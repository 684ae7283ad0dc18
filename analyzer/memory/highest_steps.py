"""The steps of an iteration that can have the highest memory.

A step is left out if it is lower than another one by more than what can be allocated beside the microbatches in flight, or if it
equals an earlier step in all that its memory depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.memory.chunk_memory import BACKWARD, FORWARD, ChunkMemory, Situation
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.pipeline import Step

_MESSAGES: Final = 8
"""The most messages that the variables of a schedule reference during a step, or at its end."""
_ALONE: Final = Situation(backward=True, alone=True)


class PassBytes(NamedTuple):
    """Bytes of the passes of a chunk by one microbatch."""

    retained: int
    forward: int
    """At the peak of a forward."""
    backward: int
    """At the peak of a backward."""
    alone: int
    """The same if no other microbatch of the chunk is in flight."""
    graph: int
    """`ChunkMemory.graph`."""

    @classmethod
    def of(cls, chunk: ChunkMemory) -> PassBytes:
        """The passes of a chunk."""
        return cls(chunk.retained, chunk.peak(FORWARD), chunk.peak(BACKWARD), chunk.peak(_ALONE), chunk.graph)


@lru_cache(maxsize=64)
def highest_steps(iteration: Iteration, chunks: tuple[PassBytes, ...], message_bytes: int) -> frozenset[int]:
    """The indices of the steps that can be the highest in the first iteration or in a later one, and of the first passes.

    Only for iterations in which no message waits for a later step than the next, and no chunk leaves tensors or has copies.
    `message_bytes`: bytes of the largest message. Workspaces are allocated in first passes, so that none is left to allocate later.
    """
    sizes = _without_messages(iteration.order, chunks)
    first = _first_passes(iteration.order)
    most = _MESSAGES * message_bytes + max(chunk.graph for chunk in chunks)
    limit = max(sizes[max(first) + 1 :], default=0)
    found = set(first)
    alike: set[tuple[int, ...]] = set()
    counts = [0] * len(chunks)
    idle = (1 << len(chunks)) - 1  # one bit for each chunk
    passes = 0
    for index, (step, size) in enumerate(zip(iteration.order, sizes, strict=True)):
        number = step.chunk
        passes += index in first
        if step.kind == "forward":
            counts[number] += 1
            idle &= ~(1 << number)
        highest = size + most + (2 * idle.bit_count() * message_bytes if idle else 0)
        if counts[number] == 1:
            highest += chunks[number].alone - chunks[number].backward
        if highest >= limit:
            kind = (size, passes, index in first, idle, counts[number] == 1, *iteration.chunks_around(index))
            if kind not in alike:
                alike.add(kind)
                found.add(index)
        if step.kind == "backward":
            counts[number] -= 1
            idle |= (not counts[number]) << number
    return frozenset(found)


def _without_messages(order: Sequence[Step], chunks: Sequence[PassBytes]) -> list[int]:
    """For each step, bytes at its peak without messages and workspaces."""
    sizes: list[int] = []
    saved = 0
    for step in order:
        chunk = chunks[step.chunk]
        if step.kind == "forward":
            sizes.append(saved + chunk.forward)
            saved += chunk.retained
        else:
            saved -= chunk.retained
            sizes.append(saved + chunk.backward)
    return sizes


def _first_passes(order: Sequence[Step]) -> set[int]:
    """The indices of the first forward and of the first backward of each chunk."""
    found: dict[tuple[str, int], int] = {}
    for index, step in enumerate(order):
        found.setdefault((step.kind, step.chunk), index)
    return set(found.values())
