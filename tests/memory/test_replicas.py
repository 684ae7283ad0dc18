"""Data-parallel ranks that own different parts of the optimizer states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.layout.groups import group_of
from analyzer.memory.allocator.replicas import FIRST, Member, ranks_of_members, split
from analyzer.memory.ranks import rank_classes
from analyzer.results import RankMemory
from analyzer.units import MIB
from tests.job_of import job_of


def test_ranks_with_the_same_part_are_listed_together() -> None:
    """TP2 CP2 DP2: ranks 0 and 1 are a tensor-parallel group, and 0, 2, 4, 6 the group over which states are sharded."""
    job = job_of("--tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-optimizer")
    found = ranks_of_members(job, 0)
    assert [found[each] for each in sorted(found)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(group_of(job.parallel, "dp_cp", 0)) == [ranks[0] for _, ranks in sorted(found.items())]


@pytest.mark.parametrize(("line", "gpus"), [("", 8), ("--use-distributed-optimizer", 64), ("--use-distributed-optimizer", 1)])
def test_parts_are_not_simulated_without_a_distributed_optimizer_or_with_many_parts(line: str, gpus: int) -> None:
    assert not ranks_of_members(job_of(f"{line} --global-batch-size 64", gpus=gpus), 0)


def test_ranks_are_split_where_their_reserved_memory_differs() -> None:
    """1,000, 1,005, 1,030 and 1,031 MiB: two classes, each with the figures of its highest rank."""
    job = job_of("--use-distributed-optimizer", gpus=4)
    found = rank_classes(job)[0]
    reserved = {(0, 0): 1000, (1, 1): 1030, (2, 2): 1005, (3, 3): 1031}

    def memory_of(member: Member) -> RankMemory:
        return replace(found.memory, peak_reserved_bytes=reserved[member] * MIB)

    first = replace(found, memory=memory_of(FIRST))
    classes = split(first, ranks_of_members(job, 0), memory_of)
    assert [each.ranks for each in classes] == [((0, 0), (2, 2)), ((1, 1), (3, 3))]
    assert [each.memory.peak_reserved_bytes // MIB for each in classes] == [1005, 1031]
