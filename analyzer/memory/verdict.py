"""The verdict: the memory of the highest-memory rank compared with the capacity of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from analyzer.results import PhaseMemory, RankClass, Verdict
from analyzer.specs import HardwareSpec


def highest(ranks: Sequence[RankClass]) -> RankClass:
    """The rank class with the highest device memory; ties go to the lowest rank."""
    return min(ranks, key=lambda each: (-each.memory.device_bytes, each.ranks[0][0]))


def verdict(
    ranks: Sequence[RankClass],
    hardware: HardwareSpec,
    *,
    note: str = "",
    withheld: Sequence[str] = (),
    not_counted: Sequence[str] = (),
) -> Verdict:
    """Whether every rank fits, and the headroom of the highest-memory rank in bytes.

    Its `device_bytes` (reserved memory, CUDA context and NCCL buffers) are compared with the capacity. The state is tight if the
    capacity is within the estimated range (`device_range_bytes`): then the launch may or may not fit, and `fits` compares the
    estimate itself. It is also tight if the launch fits and the headroom is below the margin of `hardware`. A negative headroom is
    the amount of missing memory. `fits`, `state`, `headroom_bytes` and `margin_bytes` are None if the capacity is not known.
    They are also None if there are reasons in `withheld`, or in `not_counted`, which only adds memory, unless the launch does not
    fit without it. `ranks` must not be empty. `note` is copied to the verdict.
    """
    tightest = highest(ranks)
    if not_counted and (withheld or hardware.capacity_bytes is None or estimated_range(ranks)[0] <= hardware.capacity_bytes):
        withheld = (*withheld, *not_counted)
    if withheld:
        return Verdict(
            fits=None,
            state=None,
            gpu=hardware.name,
            capacity_bytes=hardware.capacity_bytes,
            tightest_rank=tightest.ranks[0][0],
            headroom_bytes=None,
            note=note,
            withheld="; ".join(withheld),
        )
    capacity = hardware.capacity_bytes
    headroom = None if capacity is None else capacity - tightest.memory.device_bytes
    return Verdict(
        fits=None if headroom is None else headroom >= 0,
        state=None if capacity is None else state_of(tightest.memory.device_bytes, estimated_range(ranks), hardware),
        gpu=hardware.name,
        capacity_bytes=capacity,
        tightest_rank=tightest.ranks[0][0],
        headroom_bytes=headroom,
        margin_bytes=None if capacity is None else hardware.margin_bytes,
        note=note,
    )


def verdict_with_images(
    ranks: Sequence[RankClass],
    hardware: HardwareSpec,
    *,
    images_bytes: int,
    reason: str,
    note: str = "",
    withheld: Sequence[str] = (),
    not_counted: Sequence[str] = (),
) -> Verdict:
    """The verdict of a launch whose images need `images_bytes` more at most, on the first pipeline stage.

    It fits if it does with them, and does not fit if it does not without them. Between, `reason` says why there is no verdict.
    """
    more = [_with_images(each, images_bytes) if each.pipeline_rank == 0 else each for each in ranks]
    if verdict(more, hardware).fits:
        found = verdict(more, hardware, note=note, withheld=withheld, not_counted=not_counted)
        return replace(found, images_bytes=images_bytes if highest(more).pipeline_rank == 0 else 0)
    return verdict(ranks, hardware, note=note, withheld=withheld, not_counted=(reason, *not_counted))


def _with_images(rank: RankClass, images_bytes: int) -> RankClass:
    least, most = rank.memory.device_range_bytes
    size, ends = rank.memory.device_bytes + images_bytes, (least, most + images_bytes)
    return replace(rank, memory=replace(rank.memory, device_bytes=size, device_range_bytes=ends))


def estimated_range(ranks: Sequence[RankClass]) -> tuple[int, int]:
    """The lowest and the highest device memory that the highest-memory rank may need, in bytes."""
    return _highest_range([each.memory.device_range_bytes for each in ranks])


def phases_range(phases: Sequence[PhaseMemory]) -> tuple[int, int]:
    """The same of the highest phase."""
    return _highest_range([each.device_range_bytes for each in phases])


def _highest_range(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return max(least for least, _ in ranges), max(most for _, most in ranges)


def state_of(device_bytes: int, ends: tuple[int, int], hardware: HardwareSpec) -> Literal["fits", "tight", "does not fit"]:
    """The state of an estimate with the range `ends`, for a GPU whose capacity is known."""
    least, most = ends
    if least > (hardware.capacity_bytes or 0):
        return "does not fit"
    return "tight" if is_tight(device_bytes, most, hardware) else "fits"


def is_tight(device_bytes: int, most_bytes: int, hardware: HardwareSpec) -> bool:
    """Whether memory that fits leaves less than the margin free, or the capacity is below `most_bytes`, the end of its range."""
    capacity = hardware.capacity_bytes or 0
    return most_bytes > capacity or capacity - device_bytes < hardware.margin_bytes
