"""The simulated caching allocator: requests with known results from c10/cuda/CUDACachingAllocator.cpp, and invariants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.allocator.caching_allocator import CAPTURES, SIDE_STREAM, CachingAllocator, OutOfMemory, Temporaries
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.units import KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def sizes(allocator: CachingAllocator) -> tuple[int, int]:
    """Return (allocated bytes, reserved bytes)."""
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # kMinBlockSize, kSmallBuffer
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),  # kLargeBuffer
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # kMinLargeAlloc: a separate segment
        (11 * MIB, 12 * MIB, 12 * MIB),  # kRoundLarge; the remaining 1 MiB is not split off
        (13 * MIB + 512, 14 * MIB, 14 * MIB),
    ],
)
def test_a_request_is_rounded_to_blocks_and_segments(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert sizes(allocator) == (allocated, reserved)


def test_a_remainder_above_1_mib_is_split_off() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.malloc(29 * MIB - 512)
    assert sizes(allocator) == (29 * MIB - 512, 30 * MIB)


def test_a_remainder_of_1_mib_is_not_split_off() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(29 * MIB)
    assert sizes(allocator) == (30 * MIB, 30 * MIB)


def test_unrequested_bytes_are_counted_while_they_are_allocated() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    address = allocator.malloc(29 * MIB + 512)
    assert allocator.unrequested_bytes == MIB - 512
    allocator.malloc(40 * MIB)
    allocator.free(address)
    assert allocator.unrequested_bytes == 0
    assert allocator.unrequested_at_peak_bytes == MIB - 512


def test_the_smallest_fitting_block_is_used() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(24 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(22 * MIB) == small


def test_adjacent_free_blocks_are_merged() -> None:
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


def test_empty_cache_frees_only_unused_segments() -> None:
    allocator = CachingAllocator()
    segment, _ = allocator.malloc(30 * MIB), allocator.malloc(2 * MIB)
    allocator.free(segment)
    allocator.empty_cache()
    assert sizes(allocator) == (2 * MIB, 20 * MIB)


def test_an_expandable_segment_grows_by_pages_and_splits_without_remainder() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(11 * MIB)
    assert sizes(allocator) == (11 * MIB, 20 * MIB)
    allocator.malloc(30 * MIB)  # 9 MiB are already mapped
    assert sizes(allocator) == (41 * MIB, 60 * MIB)
    allocator.free(first)
    assert allocator.malloc(10 * MIB) == first  # a block inside the segment is preferred to the expandable end
    assert allocator.reserved_bytes == 60 * MIB


def test_max_split_size_reserves_large_blocks_for_large_requests() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=20 * MIB))
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(12 * MIB)
    assert allocator.reserved_bytes == 76 * MIB
    allocator.malloc(50 * MIB)  # the block is 14 MiB larger, less than a large segment (20 MiB), and is not split
    assert sizes(allocator) == (76 * MIB, 76 * MIB)


def test_settings_are_read_from_the_environment() -> None:
    settings = AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:512"})
    assert settings == AllocatorSettings(expandable_segments=True, max_split_bytes=512 * MIB)
    assert AllocatorSettings.of({}) == AllocatorSettings()
    with pytest.raises(UnsupportedError, match="cudaMallocAsync"):
        AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})


def with_divisions(text: str) -> tuple[int, ...]:
    """Return the divisions of the intervals below 2 MiB, from 2 to 4 MiB, and so on."""
    return AllocatorSettings.of({"PYTORCH_ALLOC_CONF": f"roundup_power2_divisions:{text},expandable_segments:True"}).divisions


def test_roundup_divisions_are_read_as_in_pytorch() -> None:
    """`parseRoundUpPower2Divisions` in c10/core/AllocatorConfig.cpp: 256 MiB is interval 8, and `>` starts after the last size."""
    assert with_divisions("4") == (4,) * 16
    assert with_divisions("1") == with_divisions("[>:0]") == ()
    assert with_divisions("[256:1,512:2,1024:4,>:8]") == (*(1,) * 9, 2, 4, *(8,) * 5)
    assert with_divisions("[64:8,256:4]") == (*(8,) * 7, 0, 4, *(0,) * 7)


@pytest.mark.parametrize("text", ["3", "x", "[3:4]", "[4:3]", "[256]"])
def test_divisions_that_pytorch_refuses_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="roundup_power2_divisions"):
        with_divisions(text)


@pytest.mark.parametrize(
    ("mib", "expected"),
    [(1200, 1280), (1024, 1024), (1281, 1536), (2047, 2048), (2.5, 2.5), (3.1, 3.5)],  # 1280, 1536, 1792: a comment in PyTorch
)
def test_requests_are_rounded_up_to_the_next_division(mib: float, expected: float) -> None:
    allocator = CachingAllocator(AllocatorSettings(divisions=(4,) * 16))
    before = int(mib * MIB) // 512 * 512
    address = allocator.malloc(before)
    assert allocator.allocated_bytes == expected * MIB
    assert allocator.unrequested_bytes == expected * MIB - before
    allocator.free(address)
    assert (allocator.allocated_bytes, allocator.unrequested_bytes) == (0, 0)


def test_the_rounding_of_large_blocks_can_be_set() -> None:
    """A request of at least max_split_size uses a free block that is less than max_non_split_rounding larger (`get_free_block`)."""
    conf = "max_split_size_mb:20,max_non_split_rounding_mb:"
    for rounding, reserved in ((21, 64), (14, 64 + 50)):
        allocator = CachingAllocator(AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": f"{conf}{rounding}"}))
        allocator.free(allocator.malloc(64 * MIB))
        allocator.malloc(50 * MIB)
        assert allocator.reserved_bytes == reserved * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_unused_segments_are_freed_before_a_request_fails(expandable: bool) -> None:
    """`malloc` releases cached blocks and tries again (`release_cached_blocks`)."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable), capacity_bytes=200 * MIB)
    held = allocator.malloc(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.reserved_bytes == 180 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    allocator.free(held)
    assert allocator.peak_reserved_bytes <= 200 * MIB


def test_a_double_free_is_an_error() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(KeyError):
        allocator.free(address)


@st.composite
def programs(draw: st.DrawFn) -> list[int]:
    """Draw a list of steps: a positive number allocates that many bytes, a negative number selects a live block to free."""
    size = st.integers(1, 4 * MIB) | st.integers(1, 64 * MIB) | st.sampled_from([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB])
    return draw(st.lists(size | st.integers(-8, -1), max_size=60))


@given(program=programs(), settings=st.sampled_from([AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_bytes=20 * MIB)]))
def test_invariants_hold_for_any_program(program: list[int], settings: AllocatorSettings) -> None:
    allocator, live = CachingAllocator(settings), {}
    for step in program:
        if step > 0:
            before = allocator.allocated_bytes
            address = allocator.malloc(step)
            live[address] = allocator.allocated_bytes - before
            assert live[address] >= step
        elif live:
            address = list(live)[step % len(live)]
            allocator.free(address)
            del live[address]
        ranges = sorted((address, address + size) for address, size in live.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert sum(live.values()) == allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for address in list(live):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == 0


@given(
    held=st.lists(st.integers(1 * MIB + 1, 40 * MIB), max_size=8),
    freed=st.sets(st.integers(0, 7)),
    temporary=st.lists(st.integers(1 * MIB + 1, 30 * MIB), min_size=1, max_size=5),
    aside=st.sets(st.integers(0, 4)),
    expandable=st.booleans(),
)
def test_temporary_tensors_leave_the_allocator_as_it_was(
    held: list[int], freed: set[int], temporary: list[int], aside: set[int], expandable: bool
) -> None:
    """`malloc_and_free` has the same effect as separate calls, also on later allocations. Tensors `aside` are on another stream."""
    streams = [SIDE_STREAM if index in aside else 0 for index in range(len(temporary))]
    combined, separate = (CachingAllocator(AllocatorSettings(expandable_segments=expandable)) for _ in range(2))
    for allocator in (combined, separate):
        addresses = [allocator.malloc(size, stream=stream) for size in held for stream in (0, SIDE_STREAM)]
        for index in sorted(freed):
            if index < len(addresses):
                allocator.free(addresses[index])
    combined.malloc_and_free(Temporaries.of(-size if stream else size for size, stream in zip(temporary, streams, strict=True)))
    for address in [separate.malloc(size, stream=stream) for size, stream in zip(temporary, streams, strict=True)]:
        separate.free(address)
    for allocator in (combined, separate):
        for size in (*temporary, *held):
            for stream in (0, SIDE_STREAM):
                allocator.malloc(size, stream=stream)
    assert _figures(combined) == _figures(separate)


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
    """`malloc_permanent` has the effect of separate calls of `malloc`, also on everything that is allocated later."""
    combined, separate = (CachingAllocator(AllocatorSettings(expandable_segments=expandable)) for _ in range(2))
    for allocator in (combined, separate):
        for address in [allocator.malloc(size) for size in freed]:
            allocator.free(address)
    combined.malloc_permanent(bytes, count)
    for _ in range(count):
        separate.malloc(bytes)
    assert _figures(combined) == _figures(separate)
    for allocator in (combined, separate):
        for size in later:
            allocator.malloc(size)
    assert _figures(combined) == _figures(separate)


def _figures(allocator: CachingAllocator) -> tuple[int, ...]:
    return (
        allocator.allocated_bytes,
        allocator.reserved_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.unrequested_bytes,
        allocator.unrequested_at_peak_bytes,
    )


def test_segments_of_captures_are_not_returned_if_the_memory_does_not_suffice() -> None:
    """CUDA graphs write to their pool in each replay. `release_cached_blocks` leaves private pools that are in use alone."""
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    for stream in (0, CAPTURES):
        allocator.free(allocator.malloc(40 * MIB, stream=stream))
    allocator.malloc(50 * MIB)  # the segment of the first stream is returned
    assert allocator.reserved_bytes == 90 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(20 * MIB)
