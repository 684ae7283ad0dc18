"""Launches of one training that start different numbers of processes on its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from analyzer.script.run import Intercepted
from analyzer.script.stand_ins.records import identity

PROCESSES: Final = frozenset({"--nproc_per_node", "--nproc-per-node"})
NODES: Final = frozenset({"--nnodes"})


def together(launches: Sequence[Intercepted]) -> tuple[Intercepted, ...]:
    """The launches, with those of the nodes of one training as one, whose `processes` is the sum of theirs.

    These differ in the number of processes and in the rank of the node only, and there are as many as nodes.
    """
    groups: dict[tuple[str, ...], list[Intercepted]] = {}
    for launch in launches:
        groups.setdefault(_key(launch), []).append(launch)
    kept = []
    for launch in launches:
        group = groups[_key(launch)]
        counts = [_number(each.argv, PROCESSES) for each in group]
        if len(set(counts)) < 2 or None in counts or len(group) != _number(launch.argv, NODES):
            kept.append(launch)
        elif launch is group[0]:
            kept.append(replace(launch, processes=sum(count or 0 for count in counts)))
    return tuple(kept)


def _key(launch: Intercepted) -> tuple[str, ...]:
    """What the launches of one training have in common: everything but the rank of the node and the number of processes."""
    words = list(identity(list(launch.argv)))
    for position, word in enumerate(words[:-1]):
        if word in PROCESSES:
            words[position + 1] = "N"
    return (str(launch.folder), *words)


def _number(argv: Sequence[str], flags: frozenset[str]) -> int | None:
    found = [argv[position + 1] for position, word in enumerate(argv[:-1]) if word in flags]
    return int(found[-1]) if found and found[-1].isdecimal() else None
