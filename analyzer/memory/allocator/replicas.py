"""Data-parallel ranks whose memory differs because the distributed optimizer gives them other parts of the parameters.

Each rank creates fp32 weights and moments for its part of the gradient buffer. How these fit into cached blocks depends on where
parameters begin and end in that part. With 2 to 8 parts, reserved memory differed by up to 4 % between ranks of a measured run
(docs/accuracy.md). With more parts the differences are below 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from analyzer.layout.data_parallel import reduction_size
from analyzer.layout.groups import RankRanges, replicas
from analyzer.results import RankClass, RankMemory
from analyzer.specs import TrainingJob

MAX_PARTS: Final = 8
"""Maximum number of parts of the optimizer states for which every part is simulated."""
SAME: Final = 0.01
"""Ranks are listed together if their reserved memory differs by at most this fraction."""
Member = tuple[int, int]
"""The index of a rank among those that share the optimizer states of dense parameters, and the same for experts."""
FIRST: Final[Member] = (0, 0)


def ranks_of_members(job: TrainingJob, pipeline_rank: int) -> dict[Member, list[int]]:
    """The global ranks of a pipeline stage by their parts of the optimizer states; empty if the parts are not simulated."""
    sizes = reduction_size(job.parallel, "dp_cp"), reduction_size(job.parallel, "edp")
    elsewhere = job.fsdp or job.optimizer.offload or job.optimizer.facts.updates != "in place"
    if elsewhere or not job.optimizer.distributed or not 1 < sizes[0] <= MAX_PARTS:
        return {}
    found: dict[Member, list[int]] = {}
    for rank, dense, expert in replicas(job.parallel, pipeline_rank):
        found.setdefault((dense % sizes[0], expert % sizes[1]), []).append(rank)
    return found


def member_of(job: TrainingJob, pipeline_rank: int, rank: int) -> Member:
    """The indices of a global rank of a pipeline stage in its data-parallel group and in that of the experts."""
    return next((dense, expert) for each, dense, expert in replicas(job.parallel, pipeline_rank) if each == rank)


def split(found: RankClass, members: dict[Member, list[int]], memory_of: Callable[[Member], RankMemory]) -> list[RankClass]:
    """The class as one class for ranks with about the same reserved memory, in the order of their first ranks.

    The figures of each class are those of its rank with the most reserved memory. `members`: all ranks of the class.
    """
    memories = {FIRST: found.memory}
    memories.update((member, memory_of(member)) for member in members if member != FIRST)
    classes: list[tuple[RankMemory, list[int]]] = []
    for member in sorted(members, key=lambda member: -memories[member].peak_reserved_bytes):
        memory = memories[member]
        if classes and memory.peak_reserved_bytes >= classes[-1][0].peak_reserved_bytes * (1 - SAME):
            classes[-1][1].extend(members[member])
        else:
            classes.append((memory, list(members[member])))
    if len(classes) == 1:
        return [replace(found, memory=classes[0][0])]
    split = [replace(found, ranks=_ranges(ranks), memory=memory) for memory, ranks in classes]
    return sorted(split, key=lambda each: each.ranks[0][0])


def _ranges(ranks: Iterable[int]) -> RankRanges:
    """Inclusive ranges of these ranks."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)
