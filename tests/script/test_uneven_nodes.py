"""Launches of one training that start different numbers of processes on its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.script.run import Intercepted
from analyzer.script.uneven_nodes import together


def launch(nodes: int, processes: int, rank: int, more: str = "") -> Intercepted:
    words = f"torchrun --nnodes {nodes} --node_rank {rank} --nproc_per_node {processes} pretrain_gpt.py{more}".split()
    return Intercepted(tuple(words), tuple(words), {}, Path("/nowhere"), line=rank + 1, source="launch.sh", times=1)


def test_the_processes_of_all_nodes_are_added() -> None:
    """Nodes of 8, 4 and 4 GPUs have 16 ranks together."""
    [found] = together([launch(3, 8, 0), launch(3, 4, 1), launch(3, 4, 2)])
    assert (found.line, found.processes) == (1, 16)


@pytest.mark.parametrize(
    "launches",
    [
        (launch(2, 8, 0), launch(2, 8, 1)),  # equal nodes need no sum
        (launch(3, 8, 0), launch(3, 4, 1)),  # one of three nodes is missing
        (launch(2, 8, 0), launch(2, 4, 1, " --seed 2")),  # two trainings
    ],
    ids=["equal nodes", "a node is missing", "two trainings"],
)
def test_other_launches_stay(launches: tuple[Intercepted, ...]) -> None:
    assert together(launches) == launches
