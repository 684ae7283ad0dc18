"""Does it fit: the highest-memory rank compared with the capacity of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from analyzer.results import RankClass, Verdict
from analyzer.specs import HardwareSpec


def highest(ranks: Sequence[RankClass]) -> RankClass:
    """The rank class that takes most of its device; of equals the one with the lowest rank."""
    return min(ranks, key=lambda each: (-each.memory.device_bytes, each.ranks[0][0]))


def verdict(ranks: Sequence[RankClass], hardware: HardwareSpec, *, note: str = "") -> Verdict:
    """Whether every rank fits: `device_bytes` (reserved memory, CUDA context and NCCL) of the highest-memory rank compared with
    the capacity.

    It is tight where the capacity lies within what the device may show (`device_range_bytes`): then nobody knows before it
    runs, and `fits` says on which side the estimate is. `ranks` has at least one element. `fits`, `state` and
    `headroom_bytes` are None where the capacity is not known; a headroom below zero is what is missing. `note` is passed on
    to the reader.
    """
    tightest = highest(ranks)
    capacity = hardware.capacity_bytes
    headroom = None if capacity is None else capacity - tightest.memory.device_bytes
    return Verdict(
        fits=None if headroom is None else headroom >= 0,
        state=None if capacity is None else _state(ranks, capacity),
        gpu=hardware.name,
        capacity_bytes=capacity,
        tightest_rank=tightest.ranks[0][0],
        headroom_bytes=headroom,
        note=note,
    )


def _state(ranks: Sequence[RankClass], capacity: int) -> Literal["fits", "tight", "does not fit"]:
    least, most = (max(rank.memory.device_range_bytes[end] for rank in ranks) for end in (0, 1))
    return "does not fit" if least > capacity else "fits" if most <= capacity else "tight"
