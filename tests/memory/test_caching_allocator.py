"""The caching allocator, held against what c10/cuda/CUDACachingAllocator.cpp does with a few requests, and against its laws."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import UnsupportedError
from analyzer.memory.allocator.caching_allocator import AllocatorSettings, CachingAllocator
from analyzer.units import KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def sizes(allocator: CachingAllocator) -> tuple[int, int]:
    """(allocated, reserved)."""
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # kMinBlockSize, kSmallBuffer
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),  # kLargeBuffer
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # kMinLargeAlloc: a segment of its own
        (11 * MIB, 12 * MIB, 12 * MIB),  # kRoundLarge, and the rest of 1 MiB is not split off
        (13 * MIB + 512, 14 * MIB, 14 * MIB),
    ],
)
def test_one_request(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(asked)
    assert sizes(allocator) == (allocated, reserved)


def test_a_rest_of_more_than_a_mebibyte_is_split_off() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.malloc(29 * MIB - 512)
    assert sizes(allocator) == (29 * MIB - 512, 30 * MIB)


def test_a_rest_of_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(29 * MIB)
    assert sizes(allocator) == (30 * MIB, 30 * MIB)


def test_what_was_not_asked_for_is_counted_while_it_is_handed_out() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    kept = allocator.malloc(29 * MIB + 512)
    assert allocator.unrequested_bytes == MIB - 512
    allocator.malloc(40 * MIB)
    allocator.free(kept)
    assert allocator.unrequested_bytes == 0
    assert allocator.unrequested_at_peak_bytes == MIB - 512


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(24 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(22 * MIB) == small


def test_neighbours_merge_when_they_are_freed() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.malloc(4 * MIB) for _ in range(5)]
    assert sizes(allocator) == (20 * MIB, 20 * MIB)
    for piece in pieces:
        allocator.free(piece)
    assert allocator.malloc(20 * MIB) == pieces[0]
    assert allocator.reserved_bytes == 20 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(KIB, stream=0))
    allocator.malloc(KIB, stream=1)
    assert allocator.reserved_bytes == 4 * MIB


def test_empty_cache_gives_back_whole_segments_only() -> None:
    allocator = CachingAllocator()
    whole, _ = allocator.malloc(30 * MIB), allocator.malloc(2 * MIB)
    allocator.free(whole)
    allocator.empty_cache()
    assert sizes(allocator) == (2 * MIB, 20 * MIB)


def test_an_expandable_segment_grows_by_pages_and_splits_exactly() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(11 * MIB)
    assert sizes(allocator) == (11 * MIB, 20 * MIB)
    allocator.malloc(30 * MIB)  # 9 MiB are mapped already
    assert sizes(allocator) == (41 * MIB, 60 * MIB)
    allocator.free(first)
    assert allocator.malloc(10 * MIB) == first  # the block that cannot grow is preferred to the end of the segment
    assert allocator.reserved_bytes == 60 * MIB


def test_max_split_size_keeps_large_blocks_for_large_requests() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=20 * MIB))
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(12 * MIB)
    assert allocator.reserved_bytes == 76 * MIB
    allocator.malloc(50 * MIB)  # 14 MiB too large: within a large segment's size, and not split
    assert sizes(allocator) == (76 * MIB, 76 * MIB)


def test_settings_from_the_environment() -> None:
    settings = AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:512"})
    assert settings == AllocatorSettings(expandable_segments=True, max_split_bytes=512 * MIB)
    assert AllocatorSettings.of({}) == AllocatorSettings()
    with pytest.raises(UnsupportedError, match="roundup_power2_divisions"):
        AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:8"})


def test_freeing_what_was_not_given_is_an_error() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(KeyError):
        allocator.free(address)


@st.composite
def programs(draw: st.DrawFn) -> list[int]:
    """Positive: a request. Negative -k: the k-th of what is held is freed."""
    size = st.integers(1, 4 * MIB) | st.integers(1, 64 * MIB) | st.sampled_from([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB])
    return draw(st.lists(size | st.integers(-8, -1), max_size=60))


@given(program=programs(), settings=st.sampled_from([AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_bytes=20 * MIB)]))
def test_laws(program: list[int], settings: AllocatorSettings) -> None:
    allocator, held = CachingAllocator(settings), {}
    for step in program:
        if step > 0:
            before = allocator.allocated_bytes
            address = allocator.malloc(step)
            held[address] = allocator.allocated_bytes - before
            assert held[address] >= step
        elif held:
            address = list(held)[step % len(held)]
            allocator.free(address)
            del held[address]
        ranges = sorted((address, address + size) for address, size in held.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert sum(held.values()) == allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for address in list(held):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == 0


@given(
    held=st.lists(st.integers(1 * MIB + 1, 40 * MIB), max_size=8),
    freed=st.sets(st.integers(0, 7)),
    temporary=st.lists(st.integers(1 * MIB + 1, 30 * MIB), min_size=1, max_size=5),
    expandable=st.booleans(),
)
def test_temporary_tensors_leave_the_allocator_as_it_was(
    held: list[int], freed: set[int], temporary: list[int], expandable: bool
) -> None:
    """`malloc_and_free` has the effect of separate calls, also on everything that is allocated later."""
    together, apart = (CachingAllocator(AllocatorSettings(expandable_segments=expandable)) for _ in range(2))
    for allocator in (together, apart):
        addresses = [allocator.malloc(size) for size in held]
        for place in sorted(freed):
            if place < len(addresses):
                allocator.free(addresses[place])
    together.malloc_and_free(temporary)
    for address in [apart.malloc(size) for size in temporary]:
        apart.free(address)
    for allocator in (together, apart):
        for size in (*temporary, *held):
            allocator.malloc(size)

    assert _figures(together) == _figures(apart)


@given(
    freed=st.lists(st.integers(1 * MIB + 1, 40 * MIB), max_size=4),
    bytes=st.integers(1 * MIB + 1, 40 * MIB),
    count=st.integers(1, 6),
    later=st.lists(st.integers(1 * MIB + 1, 30 * MIB), max_size=5),
    expandable=st.booleans(),
)
def test_equal_tensors_that_stay_are_allocated_like_separate_ones(
    freed: list[int], bytes: int, count: int, later: list[int], expandable: bool
) -> None:
    """`hold` has the effect of separate calls of `malloc`, also on everything that is allocated later."""
    together, apart = (CachingAllocator(AllocatorSettings(expandable_segments=expandable)) for _ in range(2))
    for allocator in (together, apart):
        for address in [allocator.malloc(size) for size in freed]:
            allocator.free(address)
    together.hold(bytes, count)
    for _ in range(count):
        apart.malloc(bytes)
    assert _figures(together) == _figures(apart)
    for allocator in (together, apart):
        for size in later:
            allocator.malloc(size)
    assert _figures(together) == _figures(apart)


def _figures(allocator: CachingAllocator) -> tuple[int, ...]:
    return (
        allocator.allocated_bytes,
        allocator.reserved_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.unrequested_bytes,
        allocator.unrequested_at_peak_bytes,
    )
