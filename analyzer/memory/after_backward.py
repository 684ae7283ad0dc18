"""Peaks of a forward or a backward that follows a backward of the same chunk.

Checkpoints around MoE layers leave tensors allocated after their backward, until the next dispatch of tokens replaces what the
dispatcher references: in the next forward, or in the recomputation of the next backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.memory.block_memory import BlockMemory
from analyzer.memory.placement import Placement, Point, from_outside, placed
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.program.chunks import Block


def next_forward_peak(
    blocks: Sequence[tuple[Block, BlockMemory]],
    placements: tuple[Placement, ...],
    frames: tuple[tuple[Tensor, ...], ...],
    leftover: int,
) -> Point:
    """The peak of the forward.

    `placements`: the first and the last of each of `blocks`, with the tensors of earlier blocks that local variables reference
    (`frames`). `leftover`: bytes that all checkpoints left in the backward before it.
    """
    found: list[Point] = []
    left = iter(zip(placements, frames, strict=True))
    for block, memory in blocks:
        for repetition in sorted({0, block.times - 1}):
            placement, frame = next(left)
            instants = memory.forward
            last = max((each.number for each in instants if each.kind is ModuleKind.DISPATCH), default=0)
            for holding in (True, False):
                during = [each for each in instants if (each.number < last) is holding]
                if during:
                    after = leftover - (repetition + (not holding)) * memory.leftover
                    point = placed(placement, max(during, key=lambda each: each.bytes), outside=frame)
                    found.append(point._replace(saved=point.saved + after, bytes=point.bytes + after, leftover=after))
        leftover -= block.times * memory.leftover
    return max(found, key=lambda each: each.bytes)


def next_backward_peak(placements: tuple[Placement, ...], received: tuple[Tensor, ...], leftover: int) -> Point:
    """The peak of the backward. `received`: the gradient that the schedule references.

    A checkpoint frees what it left in the backward before this one when it dispatches tokens in its recomputation. `leftover`:
    bytes that all of them leave.
    """
    gradient = total_bytes(received)
    highest: list[Point] = []
    for placement in placements:
        memory = placement.memory
        recomputed = [each.number for each in memory.backward if each.recomputed and each.kind is ModuleKind.DISPATCH]
        for holding in (True, False):
            during = [each for each in memory.backward if (each.number < max(recomputed, default=0)) is holding]
            if not during:
                continue
            instant = max(during, key=lambda each: each.bytes - each.leftover + from_outside(placement, each, gradient))
            found = placed(placement, instant, outside=received)
            left = leftover + memory.leftover_input if holding else leftover - memory.leftover
            more = left - (found.leftover + (placement.shared if instant.shares_leftover else 0))
            highest.append(found._replace(saved=found.saved + more, bytes=found.bytes + more, leftover=left))
    return max(highest, key=lambda each: each.bytes)
