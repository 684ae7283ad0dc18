"""Whether the highest-memory rank fits its GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.verdict import highest, verdict
from analyzer.results import RankClass
from analyzer.specs import HardwareSpec
from tests.fake_report import small_report

RANKS = small_report().ranks


def _of(sizes: dict[int, int]) -> tuple[RankClass, ...]:
    """Return rank classes with the given first ranks and device bytes."""
    return tuple(
        replace(
            RANKS[0],
            ranks=((rank, rank + 3),),
            memory=replace(RANKS[0].memory, device_bytes=size, device_range_bytes=(size - 5, size + 7)),
        )
        for rank, size in sizes.items()
    )


def test_the_highest_memory_rank_determines_the_verdict() -> None:
    result = verdict(_of({0: 20, 4: 50, 8: 30}), HardwareSpec(name="X", capacity_bytes=40))
    assert (result.fits, result.tightest_rank, result.headroom_bytes) == (False, 4, -10)
    assert (result.gpu, result.capacity_bytes) == ("X", 40)


def test_ties_go_to_the_lowest_rank() -> None:
    assert highest(_of({8: 50, 4: 50, 0: 20})).ranks == ((4, 7),)


@pytest.mark.parametrize(("capacity", "fits"), [(49, False), (50, True), (51, True)])
def test_memory_up_to_the_capacity_fits(capacity: int, fits: bool) -> None:
    result = verdict(_of({0: 50}), HardwareSpec(capacity_bytes=capacity))
    assert (result.fits, result.headroom_bytes) == (fits, capacity - 50)


@pytest.mark.parametrize(
    ("capacity", "state", "fits"),
    [(44, "does not fit", False), (45, "tight", False), (50, "tight", True), (56, "tight", True), (57, "fits", True)],
)
def test_a_capacity_within_the_device_range_is_tight(capacity: int, state: str, fits: bool) -> None:
    result = verdict(_of({0: 20, 4: 50}), HardwareSpec(capacity_bytes=capacity))
    assert (result.state, result.fits) == (state, fits)


def test_without_a_capacity_the_tightest_rank_is_reported_without_a_verdict() -> None:
    result = verdict(_of({0: 20, 4: 50}), HardwareSpec(), note="why")
    assert (result.fits, result.headroom_bytes, result.tightest_rank, result.note) == (None, None, 4, "why")
    assert result.state is None


def test_the_capacity_is_compared_with_device_memory_not_with_the_allocated_peak() -> None:
    memory = RANKS[0].memory
    between = (memory.peak_allocated_bytes + memory.device_bytes) // 2
    assert verdict(RANKS, HardwareSpec(capacity_bytes=between)).fits is False


@pytest.mark.parametrize(
    ("capacity", "margin", "state", "fits"),
    [
        (60, 10, "fits", True),  # headroom equal to the margin
        (60, 11, "tight", True),
        (57, 0, "fits", True),
        (55, 6, "tight", True),  # the range and the margin
        (48, 10, "tight", False),  # the range; the estimate does not fit
        (44, 100, "does not fit", False),
    ],
)
def test_headroom_below_the_margin_is_tight_and_does_not_change_whether_it_fits(
    capacity: int, margin: int, state: str, fits: bool
) -> None:
    """The estimate is 50, from 45 to 57."""
    result = verdict(_of({0: 20, 4: 50}), HardwareSpec(capacity_bytes=capacity, margin_bytes=margin))
    assert (result.state, result.fits, result.margin_bytes) == (state, fits, margin)


def test_there_is_no_margin_without_a_capacity() -> None:
    assert verdict(RANKS, HardwareSpec()).margin_bytes is None
