"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved memory for a sequence of requests.

Source: c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.5 to 2.13): `round_size`, `get_allocation_size`, `get_pool`, `get_free_block`,
`should_split`, `free_block`, `try_allocate_expandable_block`. Allocated bytes are the sizes of the blocks in use, as in
`torch.cuda.memory_allocated`. A block of the large pool is not split if 1 MiB or less would remain, so it can be larger than the
request. Reserved bytes are the sizes of the segments allocated with CUDA.

If a new segment would exceed the capacity, unused segments are returned to CUDA (`release_cached_blocks`), as `malloc` does before
it fails. Known limitations: with `max_split_size_mb` PyTorch first returns only segments of at least that size
(`release_available_cached_blocks`). A block that another stream still uses is free at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from analyzer.memory.allocator.pool import ADDRESS, ADDRESS_BITS, LARGE_SEGMENT, SMALL_SEGMENT, Pool
from analyzer.memory.allocator.settings import UNLIMITED, AllocatorSettings, rounded
from analyzer.modules.tree import SIDE_STREAM
from analyzer.units import MIB, round_up

MIN_BLOCK: Final = 512
SMALL_SIZE: Final = 1 * MIB
"""Requests of up to this size use the small pool; `kSmallSize`."""
MIN_LARGE_ALLOCATION: Final = 10 * MIB
"""Requests of at least this size get a separate segment."""
ROUND_LARGE: Final = 2 * MIB
DEFAULTS: Final = AllocatorSettings()
CAPTURES: Final = 4
"""The identifier of the stream of captures. Its pool stands for the private pool of CUDA graphs, whose segments are not returned to
CUDA while the graphs exist (`release_cached_blocks`)."""
POOL_BITS: Final = 48
"""The addresses of a pool begin with its number, shifted by this."""


class OutOfMemory(Exception):
    """A request does not fit into the capacity, even without unused segments."""


class Temporaries(NamedTuple):
    """Temporary tensors that are allocated together, and freed in the same order."""

    sizes: tuple[int, ...]
    """The sizes of their blocks."""
    bytes: int
    most: int
    """The largest bytes of the blocks: a free block that is at most `SMALL_SIZE` larger is not split."""
    large: bool
    """Whether all use the large pool."""
    aside: tuple[int, ...] = ()
    """The sizes of further blocks, on the second stream."""
    aside_bytes: int = 0

    @classmethod
    def of(cls, requests: Iterable[int]) -> Temporaries:
        """The tensors for these requested bytes; the bytes of tensors on the second stream are negative."""
        blocks = [round_up(size, MIN_BLOCK) if size > 0 else -round_up(-size, MIN_BLOCK) for size in requests]
        sizes, aside = tuple(size for size in blocks if size > 0), tuple(-size for size in blocks if size < 0)
        most = sum(sizes) + sum(aside) + len(blocks) * SMALL_SIZE
        return cls(sizes, sum(sizes), most, all(abs(size) > SMALL_SIZE for size in blocks), aside, sum(aside))


def segment_size(size: int) -> int:
    """The size of the segment for a block."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE_ALLOCATION else round_up(size, ROUND_LARGE)


class CachingAllocator:
    """The allocator of one device. All sizes are in bytes."""

    def __init__(self, settings: AllocatorSettings = DEFAULTS, *, capacity_bytes: int = UNLIMITED) -> None:
        self._settings = settings
        self._capacity = capacity_bytes
        self._max_split = settings.max_split_bytes
        self._splits_all = settings.max_split_bytes == UNLIMITED
        self._divisions = settings.divisions
        self._limited = capacity_bytes < UNLIMITED
        self._combines = self._splits_all and not settings.divisions and not settings.expandable_segments and not self._limited
        """Whether several requests may be computed together."""
        self._numbered: list[Pool] = []
        """The pools by their numbers."""
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._large = self._pool(LARGE_SEGMENT, 0)
        """The large pool of the stream of the computation."""
        self._in_use: dict[int, int] = {}
        """The sizes of the blocks in use by their addresses."""
        self._unrequested: dict[int, int] = {}
        """Of those that are larger than their requests, the bytes in excess."""
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.unrequested_bytes = 0
        """The part of the allocated bytes in excess of the requests: blocks that are not split."""
        self.unrequested_at_peak_bytes = 0
        """The same at the peak of the allocated bytes."""

    def malloc(self, bytes: int, *, stream: int = 0) -> int:
        """Allocates `bytes` and returns the address.

        Raises ValueError if `bytes` is not positive: PyTorch does not allocate memory for empty tensors.
        """
        if bytes <= 0:
            raise ValueError(f"bytes must be positive, not {bytes}")
        size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        requested = size
        if self._divisions:
            size = rounded(size, self._divisions)
        pool = self._pools.get((size <= SMALL_SIZE, stream)) or self._pool(size, stream)
        keys, key = pool.keys, size << ADDRESS_BITS
        found: tuple[int, int] | None = None
        if keys and keys[-1] >= key:  # most requests of a new model are larger than every free block
            if self._splits_all and not pool.expandable:
                key = keys.pop(bisect_left(keys, key))
                address, block = key & ADDRESS, key >> ADDRESS_BITS
                found = address, block
                del pool.starting[address], pool.ending[address + block]
            else:
                found = self._free_block(pool, size)
        if found is None:
            found = self._grow(pool, size) if pool.expandable else self._segment(pool, size)
        address, block = found
        remaining = block - size
        if remaining and (pool.always_splits or (remaining > SMALL_SIZE and size < self._max_split)):
            pool.add(address + size, remaining)
            block, remaining = size, 0
        self._in_use[address] = block
        unrequested = size - requested + remaining
        if unrequested:
            self._unrequested[address] = unrequested
            self.unrequested_bytes += unrequested
        self.allocated_bytes = allocated = self.allocated_bytes + block
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.unrequested_at_peak_bytes = allocated, self.unrequested_bytes
        return address

    def free(self, address: int) -> None:
        """Frees an address that `malloc` returned. Raises KeyError for any other address."""
        size = self._in_use.pop(address)
        self.allocated_bytes -= size
        if address in self._unrequested:
            self.unrequested_bytes -= self._unrequested.pop(address)
        self._numbered[address >> POOL_BITS].merge(address, size)

    def free_all(self, addresses: Iterable[int]) -> None:
        """Frees these addresses. The result does not depend on their order."""
        start = end = -1
        for address in sorted(addresses):
            size = self._in_use.pop(address)
            self.allocated_bytes -= size
            if address in self._unrequested:
                self.unrequested_bytes -= self._unrequested.pop(address)
            if address != end:
                self._freed(start, end)
                start = address
            end = address + size
        self._freed(start, end)

    def _freed(self, start: int, end: int) -> None:
        """Adds what is free from `start` to `end`, if that is not empty."""
        if start < end:
            self._numbered[start >> POOL_BITS].merge(start, end - start)

    def malloc_each(self, bytes: int, count: int, *, stream: int = 0) -> list[int]:
        """Allocates `bytes` `count` times and returns the addresses.

        The result is that of `count` calls of `malloc`. It is faster if each block needs a separate segment.
        """
        length = 0 if stream or count == 1 else self._length_of_each(bytes, self._large.largest)
        if not length:
            return [self.malloc(bytes, stream=stream) for _ in range(count)]
        first = self._large.end
        self._segments(bytes, length, count)
        addresses = list(range(first, self._large.end, length + LARGE_SEGMENT))
        self._large.segments.update(dict.fromkeys(addresses, length))
        self._in_use.update(dict.fromkeys(addresses, length))
        if length > (size := round_up(bytes, MIN_BLOCK)):
            self._unrequested.update(dict.fromkeys(addresses, length - size))
        return addresses

    def malloc_permanent(self, bytes: int, count: int) -> None:
        """The same for blocks that cannot be freed. It is also faster if there are free blocks of this size."""
        count -= self._taken(bytes, count)
        while count:
            length = self._length_of_each(bytes, self._large.largest)
            if length:
                self._segments(bytes, length, count)
                return
            self.malloc(bytes)
            count -= 1

    def malloc_copies(self, copied: int, bytes: int, count: int) -> None:
        """Allocates `bytes` `count` times, each beside a temporary tensor of fewer bytes. The blocks cannot be freed.

        The result is that of separate calls of `malloc` and `free`. It is faster if the temporary tensor gets the same block each
        time, and each block is a free one of this size or needs a separate segment.
        """
        size, keys = round_up(bytes, MIN_BLOCK), self._large.keys
        while count:
            place = bisect_left(keys, copied << ADDRESS_BITS)
            if place < len(keys):
                block = keys[place] >> ADDRESS_BITS
                if block <= size:
                    count -= self._taken(bytes, count - 1, after=block == size)
                others = keys[place - 1 : place] if place == len(keys) - 1 else keys[-1:]
                length = self._length_of_each(bytes, max(block - copied, *(key >> ADDRESS_BITS for key in others), 0))
                if length:
                    self._segments(bytes, length, count - 1)
                    count = 1
            copy = self.malloc(copied)
            self.malloc(bytes)
            self.free(copy)
            count -= 1

    def _taken(self, bytes: int, count: int, *, after: bool = False) -> int:
        """Allocates up to `count` free blocks of exactly this size, or of those `after` the first one. Returns how many."""
        pool, size = self._large, round_up(bytes, MIN_BLOCK)
        if not self._combines or size <= SMALL_SIZE:
            return 0
        first, end = (bisect_left(pool.keys, each << ADDRESS_BITS) for each in (size, size + 1))
        first += after
        keys = pool.keys[first : min(end, first + count)]
        del pool.keys[first : first + len(keys)]
        for key in keys:
            address = key & ADDRESS
            del pool.starting[address], pool.ending[address + size]
        self._allocated(size * len(keys))
        return len(keys)

    def _length_of_each(self, bytes: int, largest: int) -> int:
        """The size of the segments for blocks of `bytes` if each of any number of them needs a separate one without a rest; or 0.

        `largest`: the size of the largest free block.
        """
        size = round_up(bytes, MIN_BLOCK)
        length = round_up(size, ROUND_LARGE)
        together = self._combines and size >= MIN_LARGE_ALLOCATION and length - size <= SMALL_SIZE and largest < size
        return length if together else 0

    def _segments(self, bytes: int, length: int, count: int) -> None:
        """Allocates segments with one block each."""
        self._large.end += (length + LARGE_SEGMENT) * count
        self._reserve(length * count)
        self.unrequested_bytes += (length - round_up(bytes, MIN_BLOCK)) * count
        self._allocated(length * count)

    def _allocated(self, bytes: int) -> None:
        self.allocated_bytes += bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.unrequested_at_peak_bytes = self.allocated_bytes, self.unrequested_bytes

    def malloc_and_free(self, temporaries: Temporaries) -> None:
        """Allocates one block for each size, and then frees all of them in the same order.

        If free blocks satisfy all requests, the blocks are merged again at the end, and only the peak can change.
        """
        pool = self._large
        merged = self._combines and temporaries.large
        if (
            merged
            and self.allocated_bytes + temporaries.most <= self.peak_allocated_bytes
            and pool.largest >= temporaries.bytes
            and (not temporaries.aside or self._pool(temporaries.aside[0], SIDE_STREAM).largest >= temporaries.aside_bytes)
        ):
            return  # one free block is large enough for all requests, and they cannot raise the peak
        if temporaries.aside:
            addresses = [self.malloc(size, stream=SIDE_STREAM) for size in temporaries.aside]
            if temporaries.sizes:
                self.malloc_and_free(temporaries._replace(aside=()))
            for address in addresses:
                self.free(address)
            return
        if not merged:
            for address in [self.malloc(size) for size in temporaries.sizes]:
                self.free(address)
            return
        total, unrequested = self._at_once(temporaries.sizes)
        if self.allocated_bytes + total > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes + total
            self.unrequested_at_peak_bytes = self.unrequested_bytes + unrequested

    def _at_once(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Bytes of the blocks of large temporary tensors, and bytes in excess of them. New segments are free afterwards."""
        pool = self._large
        keys = pool.keys
        count = len(keys)
        taken: list[int] = []  # places in `keys`
        remaining_parts: list[int] = []  # free parts of split blocks, sorted
        created: list[int] = []
        total = unrequested = 0
        for size in sizes:
            place = bisect_left(keys, size << ADDRESS_BITS)
            while place in taken:
                place += 1
            block_size = keys[place] >> ADDRESS_BITS if place < count else 0
            part = bisect_left(remaining_parts, size) if remaining_parts else 0
            if part < len(remaining_parts) and not 0 < block_size < remaining_parts[part]:
                block_size = remaining_parts.pop(part)
            elif block_size:
                taken.append(place)
            else:
                block_size = segment_size(size)
                created.append(block_size)
            remaining = block_size - size
            if remaining > SMALL_SIZE:
                insort(remaining_parts, remaining)
                total += size
            else:
                total += block_size
                unrequested += remaining
        for length in created:
            pool.add(self._new_segment(pool, length), length)
        return total, unrequested

    def empty_cache(self, *, below: int = UNLIMITED) -> None:
        """Returns unused segments of streams `below` a number to CUDA, as `torch.cuda.empty_cache` does."""
        for pool in (pool for (_, stream), pool in self._pools.items() if stream < below):
            if pool.expandable:
                self.reserved_bytes -= pool.unmap()
                continue
            for address, size in list(pool.starting.items()):
                if pool.segments.get(address) == size:
                    pool.remove(address, size)
                    del pool.segments[address]
                    self.reserved_bytes -= size

    def switch_stream(self) -> None:
        """The first stream is another one from now on: free blocks of the one before are not used."""
        before = -1 - len(self._pools)
        for small in (False, True):
            if (small, 0) in self._pools:
                self._pools[small, before] = self._pools.pop((small, 0))
        self._large = self._pool(LARGE_SEGMENT, 0)

    def _pool(self, size: int, stream: int) -> Pool:
        key = (size <= SMALL_SIZE, stream)
        if key not in self._pools:
            first = len(self._numbered) << POOL_BITS
            self._pools[key] = Pool(first, small=key[0], expandable=self._settings.expandable_segments)
            self._numbered.append(self._pools[key])
        return self._pools[key]

    def _free_block(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Removes the best free block for a request from the pool and returns its address and size.

        None if a new segment is needed.
        """
        best = pool.best_fit(size)
        limit, rounding = self._max_split, self._settings.non_split_rounding_bytes
        if best is None or size < limit <= best[1] or (size >= limit and best[1] >= size + rounding):
            return None
        pool.remove(*best)
        return best

    def _segment(self, pool: Pool, size: int) -> tuple[int, int]:
        """Address and size of a new segment."""
        length = segment_size(size)
        if self._limited:
            self._make_room(lambda: length)
        return self._new_segment(pool, length), length

    def _new_segment(self, pool: Pool, length: int) -> int:
        """The address of a new segment."""
        address = pool.end
        pool.end += length + LARGE_SEGMENT  # a gap, because segments of cudaMalloc are not merged
        pool.segments[address] = length
        self._reserve(length)
        return address

    def _grow(self, pool: Pool, size: int) -> tuple[int, int]:
        """Maps pages of the expandable segment. Address and size of a free block that is large enough, which is removed."""
        if self._limited:
            self._make_room(lambda: sum(mapped for _, _, mapped in pool.parts(size)))
        address, length, mapped = pool.take(size)
        self._reserve(mapped)
        return address, length

    def _make_room(self, needed: Callable[[], int]) -> None:
        """Returns unused segments to CUDA if the needed bytes exceed the capacity. Raises OutOfMemory if that is not enough."""
        if self.reserved_bytes + needed() <= self._capacity:
            return
        self.empty_cache(below=CAPTURES)
        if self.reserved_bytes + needed() > self._capacity:
            raise OutOfMemory

    def _reserve(self, bytes: int) -> None:
        self.reserved_bytes += bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
