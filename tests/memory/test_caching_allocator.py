"""The simulated caching allocator: requests with known results from c10/cuda/CUDACachingAllocator.cpp, and invariants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.allocator.caching_allocator import CAPTURES, CachingAllocator, OutOfMemory, Temporaries
from analyzer.memory.allocator.runner import ScriptAllocator
from analyzer.memory.allocator.script import NONE, TEMPORARY, Action, request
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.modules.tree import SIDE_STREAM
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


def test_unused_pages_inside_an_expandable_segment_are_returned_and_used_again() -> None:
    """`release_blocks` unmaps free blocks, and `find_expandable_block` takes the smallest unmapped part that has enough room."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(15 * MIB)
    hole, _, larger, _ = (allocator.malloc(size * MIB) for size in (50, 15, 100, 20))
    allocator.free(hole)
    allocator.free(larger)
    assert sizes(allocator) == (50 * MIB, 200 * MIB)
    allocator.empty_cache()
    assert sizes(allocator) == (50 * MIB, 60 * MIB)  # 40 of 50 MiB are complete pages of 20 MiB, and all of the 100 MiB
    assert allocator.malloc(45 * MIB) == hole  # 5 MiB before the unmapped pages are free
    assert sizes(allocator) == (95 * MIB, 100 * MIB)
    assert allocator.malloc(120 * MIB) == larger + 120 * MIB  # neither part has enough room
    assert allocator.malloc(100 * MIB) == larger


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
    """Draw a list of steps: a positive number allocates that many bytes, a negative number selects a live block to free.

    Zero returns unused memory to CUDA.
    """
    size = st.integers(1, 4 * MIB) | st.integers(1, 64 * MIB) | st.sampled_from([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB])
    return draw(st.lists(size | st.integers(-8, 0), max_size=60))


@given(program=programs(), settings=st.sampled_from([AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_bytes=20 * MIB)]))
def test_invariants_hold_for_any_program(program: list[int], settings: AllocatorSettings) -> None:
    allocator, live = CachingAllocator(settings), {}
    for step in program:
        if step > 0:
            before = allocator.allocated_bytes
            address = allocator.malloc(step)
            live[address] = allocator.allocated_bytes - before
            assert live[address] >= step
        elif step == 0:
            allocator.empty_cache()
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


class Direct:
    """The large pool with the default settings, as a list of the blocks of each segment, without indices of free blocks."""

    def __init__(self) -> None:
        self.segments: list[list[tuple[int, int]]] = []
        """For each segment, in the order of their addresses, the sizes of its blocks with what was requested; 0 if free."""
        self.peak_allocated = self.peak_reserved = self.unrequested_at_peak = 0

    @property
    def figures(self) -> tuple[int, ...]:
        blocks = [block for blocks in self.segments for block in blocks]
        allocated = sum(size for size, requested in blocks if requested)
        unrequested = sum(size - requested for size, requested in blocks if requested)
        reserved = sum(size for size, _ in blocks)
        self.peak_reserved = max(self.peak_reserved, reserved)
        if allocated > self.peak_allocated:
            self.peak_allocated, self.unrequested_at_peak = allocated, unrequested
        return allocated, reserved, self.peak_allocated, self.peak_reserved, unrequested, self.unrequested_at_peak

    def malloc(self, bytes: int) -> tuple[int, int]:
        """Return the segment and the offset of the block."""
        requested = -(-bytes // 512) * 512
        fits = [
            (size, segment, index)
            for segment, blocks in enumerate(self.segments)
            for index, (size, held) in enumerate(blocks)
            if not held and size >= requested
        ]
        if not fits:
            self.segments.append([(20 * MIB if requested < 10 * MIB else -(-requested // (2 * MIB)) * 2 * MIB, 0)])
            fits = [(self.segments[-1][0][0], len(self.segments) - 1, 0)]
        size, segment, index = min(fits)
        rest = size - requested
        split = [(requested, requested), (rest, 0)] if rest > MIB else [(size, requested)]
        self.segments[segment][index : index + 1] = split
        return segment, sum(size for size, _ in self.segments[segment][:index])

    def free(self, block: tuple[int, int]) -> None:
        segment, offset = block
        merged: list[tuple[int, int]] = []
        start = 0
        for size, held in self.segments[segment]:
            free = not held or start == offset
            start += size
            if free and merged and not merged[-1][1]:
                merged[-1] = merged[-1][0] + size, 0
            else:
                merged.append((size, 0 if free else held))
        self.segments[segment] = merged

    def run(self, actions: list[Action], blocks: dict[int, tuple[int, int]]) -> None:
        """Run the actions one request after another."""
        for size, slot, temporaries in actions:
            if size:
                blocks[slot] = self.malloc(size)
            elif slot != TEMPORARY:
                self.free(blocks.pop(slot))
            else:
                held = []
                for each in temporaries.sizes:
                    held.append(self.malloc(each))
                    assert self.figures
                for block in held:
                    self.free(block)
            assert self.figures


LARGE = st.integers(MIB + 1, 40 * MIB) | st.sampled_from([2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 20 * MIB, 32 * MIB])
"""Sizes that use the large pool."""


@st.composite
def scripts(draw: st.DrawFn) -> list[Action]:
    """Draw actions on the first stream: requests of few sizes, so that blocks are used again, frees, and temporary tensors."""
    sizes = draw(st.lists(LARGE, min_size=1, max_size=5))
    size, live, slots = st.sampled_from(sizes), list[int](), itertools.count()
    actions: list[Action] = []
    for kind in draw(st.lists(st.sampled_from(["allocate", "allocate", "free", "temporary"]), max_size=50)):
        if kind == "allocate":
            live.append(next(slots))
            actions.append((draw(size), live[-1], NONE))
        elif kind == "temporary":
            actions.append((0, TEMPORARY, Temporaries.of(draw(st.lists(size, min_size=1, max_size=4)))))
        elif live:
            actions.append((0, live.pop(draw(st.integers(0, len(live) - 1))), NONE))
    return actions


@given(actions=scripts(), kept=LARGE, count=st.integers(1, 6), permanent=st.booleans())
def test_a_script_has_the_result_of_its_requests_one_after_another(
    actions: list[Action], kept: int, count: int, permanent: bool
) -> None:
    """Also requests of equal size that are computed together, and what is freed together."""
    allocator, direct = ScriptAllocator(), Direct()
    slots, blocks = [0] * len(actions), dict[int, tuple[int, int]]()
    allocator.run(actions, slots)
    direct.run(actions, blocks)
    assert _figures(allocator) == direct.figures
    if permanent:
        allocator.malloc_permanent(kept, count)
        direct.run([(kept, -2, NONE)] * count, {})
        held, of_direct = [], []
    else:
        held = allocator.malloc_each(kept, count)
        of_direct = [direct.malloc(kept) for _ in range(count) if direct.figures]
    assert _figures(allocator) == direct.figures
    allocator.free_all([*held, *(slots[slot] for slot in blocks)])
    for block in (*of_direct, *blocks.values()):
        direct.free(block)
    assert _figures(allocator) == direct.figures
    allocator.run(actions, slots)
    direct.run(actions, {})
    assert _figures(allocator) == direct.figures


@given(actions=scripts(), copied=LARGE, more=LARGE | st.just(0), twice=st.booleans(), count=st.integers(1, 8))
def test_blocks_beside_a_temporary_tensor_are_those_of_separate_requests(
    actions: list[Action], copied: int, more: int, twice: bool, count: int
) -> None:
    allocator, direct = ScriptAllocator(), Direct()
    kept = 2 * copied if twice else copied + more
    allocator.run(actions, [0] * len(actions))
    direct.run(actions, {})
    allocator.malloc_copies(copied, kept, count)
    for _ in range(count):
        direct.run([(copied, 0, NONE), (kept, 1, NONE), (0, 0, NONE)], {})
    assert _figures(allocator) == direct.figures
    allocator.run(actions, [0] * len(actions))
    direct.run(actions, {})
    assert _figures(allocator) == direct.figures


@given(actions=scripts(), streams=st.lists(st.integers(0, 3), min_size=50, max_size=50), empty=st.booleans())
def test_a_script_runs_alike_with_and_without_combined_requests(actions: list[Action], streams: list[int], empty: bool) -> None:
    """With requests on several streams. A limit that is never reached switches off what is computed together."""
    both = (ScriptAllocator(), ScriptAllocator(capacity_bytes=1 << 50))
    listed = [
        (request(size, stream) if size else 0, slot, each) for (size, slot, each), stream in zip(actions, streams, strict=False)
    ]
    kept = {slot for size, slot, _ in listed if size} - {slot for size, slot, _ in listed if not size}
    for allocator in both:
        slots = [0] * len(actions)
        allocator.run(listed, slots)
        if empty:
            allocator.empty_cache()
        allocator.switch_stream()
        allocator.free_all(slots[slot] for slot in sorted(kept)[::2])
        allocator.run([(0, slot, NONE) for slot in sorted(kept)[1::2]], slots)
        allocator.run(listed, slots)
    assert _figures(both[0]) == _figures(both[1])


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
