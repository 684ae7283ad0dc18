"""Ranks of a pipeline stage put together by what they hold, where replicas hold unlike states."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from analyzer.layout.groups import RankRanges, replicas
from analyzer.specs import ParallelSpec
from analyzer.states.record import States

Part = TypeVar("Part", bound=Hashable)


def alike_ranks(
    parallel: ParallelSpec,
    pipeline_rank: int,
    *,
    dense: Sequence[Part],
    experts: Sequence[Part],
    made_of: Callable[[Part, Part], States],
) -> tuple[tuple[RankRanges, States], ...]:
    """Ranks that hold equal states, with those states; the class of the lowest rank comes first.

    `dense` has the part of each data-parallel rank, with context, and `experts` that of each of the experts' replicas;
    where they are fewer, they repeat.
    """
    numbers: dict[Part, int] = {}
    of_dense = [numbers.setdefault(part, len(numbers)) for part in dense]
    of_experts = [numbers.setdefault(part, len(numbers)) for part in experts]
    places: dict[tuple[int, int], list[int]] = {}
    for rank, replica, expert_replica in replicas(parallel, pipeline_rank):
        place = of_dense[replica % len(of_dense)], of_experts[expert_replica % len(of_experts)]
        places.setdefault(place, []).append(rank)
    parts = list(numbers)
    alike: dict[States, list[int]] = {}
    for (first, second), ranks in places.items():
        alike.setdefault(made_of(parts[first], parts[second]), []).extend(ranks)
    return tuple((_ranges(ranks), held) for held, ranks in alike.items())


def _ranges(ranks: list[int]) -> RankRanges:
    """Ranks as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] + 1 == rank:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)
