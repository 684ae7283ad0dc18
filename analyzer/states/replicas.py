"""Group the ranks of a pipeline stage by model states, if replicas have different states."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from analyzer.layout.groups import RankRanges, replicas
from analyzer.specs import ParallelSpec
from analyzer.states.record import States

Part = TypeVar("Part", bound=Hashable)


def group_by_states(
    parallel: ParallelSpec,
    pipeline_rank: int,
    *,
    dense: Sequence[Part],
    experts: Sequence[Part],
    states_of: Callable[[Part, Part], States],
) -> tuple[tuple[RankRanges, States], ...]:
    """Groups of ranks with equal model states, with these states. The group of the lowest rank comes first.

    `dense` has the part of each data-parallel rank (with context parallelism), `experts` that of each data-parallel rank of
    the experts. Shorter sequences are repeated.
    """
    numbers: dict[Part, int] = {}
    of_dense = [numbers.setdefault(part, len(numbers)) for part in dense]
    of_experts = [numbers.setdefault(part, len(numbers)) for part in experts]
    places: dict[tuple[int, int], list[int]] = {}
    for rank, replica, expert_replica in replicas(parallel, pipeline_rank):
        place = of_dense[replica % len(of_dense)], of_experts[expert_replica % len(of_experts)]
        places.setdefault(place, []).append(rank)
    parts = list(numbers)
    groups: dict[States, list[int]] = {}
    for (first, second), ranks in places.items():
        groups.setdefault(states_of(parts[first], parts[second]), []).extend(ranks)
    return tuple((_ranges(ranks), states) for states, ranks in groups.items())


def _ranges(ranks: list[int]) -> RankRanges:
    """Ranks as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] + 1 == rank:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)
