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

from analyzer.memory.allocator.settings import UNLIMITED, AllocatorSettings, rounded
from analyzer.units import MIB, round_up

MIN_BLOCK: Final = 512
SMALL_SIZE: Final = 1 * MIB
"""Requests of up to this size use the small pool; `kSmallSize`."""
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
MIN_LARGE_ALLOCATION: Final = 10 * MIB
"""Requests of at least this size get a separate segment."""
ROUND_LARGE: Final = 2 * MIB
DEFAULTS: Final = AllocatorSettings()
SIDE_STREAM: Final = 1
"""The identifier of the second stream of attention, with pools of its own. The first is 0."""
CAPTURES: Final = 4
"""The identifier of the stream of captures. Its pool stands for the private pool of CUDA graphs, whose segments are not returned to
CUDA while the graphs exist (`release_cached_blocks`)."""
_ADDRESS_BITS: Final = 62
"""Addresses are below 2 to this power."""


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


class _Block:
    """A contiguous part of a segment. `before` and `after` are the adjacent blocks of the segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "size", "unrequested")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.unrequested = 0
        """Bytes in excess of the request, while the block is in use."""
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """The free blocks of one pool (small or large) and one stream, in the order of size and address."""

    __slots__ = ("always_splits", "blocks", "expandable", "keys", "small", "tail")

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.always_splits = small or expandable
        """False for the large pool without expandable segments, whose blocks are not split if 1 MiB or less would remain."""
        self.keys: list[int] = []
        """The keys of the free blocks, sorted: the size, shifted by `_ADDRESS_BITS`, plus the address."""
        self.blocks: dict[int, _Block] = {}
        """Free blocks by key."""
        self.tail: _Block | None = None
        """The last block of the expandable segment."""

    def add(self, block: _Block) -> None:
        block.free = True
        key = (block.size << _ADDRESS_BITS) + block.address
        self.blocks[key] = block
        insort(self.keys, key)

    def remove(self, block: _Block) -> None:
        block.free = False
        key = (block.size << _ADDRESS_BITS) + block.address
        del self.blocks[key]
        keys = self.keys
        del keys[bisect_left(keys, key)]

    @property
    def largest(self) -> int:
        """The size of the largest free block; 0 if there is none."""
        return self.keys[-1] >> _ADDRESS_BITS if self.keys else 0

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least `size` bytes, at the lowest address; None if there is none.

        The last block of an expandable segment counts as unlimited, because it can grow.
        """
        for key in self.keys[bisect_left(self.keys, size << _ADDRESS_BITS) :]:
            block = self.blocks[key]
            if block is not self.tail or key == self.keys[-1]:
                return block
        return None


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
        self._large = _Pool(small=False, expandable=settings.expandable_segments)
        """The large pool of the stream of the computation."""
        self._pools: dict[tuple[bool, int], _Pool] = {(False, 0): self._large}
        self._in_use: dict[int, _Block] = {}
        self._next_segment = LARGE_SEGMENT
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
        keys, key = pool.keys, size << _ADDRESS_BITS
        block: _Block | None = None
        if keys and keys[-1] >= key:  # most requests of a new model are larger than every free block
            if self._splits_all and pool.tail is None:
                block = pool.blocks.pop(keys.pop(bisect_left(keys, key)))
                block.free = False
            else:
                block = self._free_block(pool, size)
        if block is None:
            block = self._grow(pool, size) if pool.expandable else self._segment(pool, size)
        remaining = block.size - size
        if remaining and (pool.always_splits or (remaining > SMALL_SIZE and size < self._max_split)):
            self._split(block, size)
            remaining = 0
        address = block.address
        self._in_use[address] = block
        unrequested = size - requested + remaining
        block.unrequested = unrequested
        self.unrequested_bytes += unrequested
        self.allocated_bytes = allocated = self.allocated_bytes + size + remaining
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.unrequested_at_peak_bytes = allocated, self.unrequested_bytes
        return address

    def free(self, address: int) -> None:
        """Frees an address that `malloc` returned. Raises KeyError for any other address."""
        block = self._in_use.pop(address)
        self.allocated_bytes -= block.size
        self.unrequested_bytes -= block.unrequested
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.remove(before)
            self._merge(block, before)
        if after is not None and after.free:
            pool.remove(after)
            self._merge(block, after)
        pool.add(block)

    def malloc_permanent(self, bytes: int, count: int) -> None:
        """Allocates `bytes` `count` times. The blocks cannot be freed.

        The result is that of `count` calls of `malloc`. It is faster if each block needs a separate segment.
        """
        size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        length = round_up(size, ROUND_LARGE)
        remaining = length - size
        while count:
            largest = self._large.largest
            if size < MIN_LARGE_ALLOCATION or remaining > SMALL_SIZE or largest >= size or not self._combines:
                self.malloc(bytes)
                count -= 1
                continue
            self._next_segment += (length + LARGE_SEGMENT) * count
            self._reserve(length * count)
            self.unrequested_bytes += remaining * count
            self.allocated_bytes += length * count
            if self.allocated_bytes > self.peak_allocated_bytes:
                self.peak_allocated_bytes, self.unrequested_at_peak_bytes = self.allocated_bytes, self.unrequested_bytes
            return

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
        if not merged or (found := self._from_free_blocks(temporaries.sizes)) is None:
            self._malloc_and_free_each(temporaries.sizes)
            return
        total, unrequested = found
        if self.allocated_bytes + total > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes + total
            self.unrequested_at_peak_bytes = self.unrequested_bytes + unrequested

    def _malloc_and_free_each(self, sizes: Sequence[int]) -> None:
        for address in [self.malloc(size) for size in sizes]:
            self.free(address)

    def _from_free_blocks(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Bytes of the free blocks for these large requests, and bytes in excess of them; None if new segments are needed."""
        keys = self._large.keys
        taken: set[int] = set()  # places in `keys`
        remaining_parts: list[int] = []  # free parts of split blocks, sorted
        total = unrequested = 0
        for size in sizes:
            place = bisect_left(keys, size << _ADDRESS_BITS)
            while place in taken:
                place += 1
            block_size = keys[place] >> _ADDRESS_BITS if place < len(keys) else UNLIMITED
            piece = bisect_left(remaining_parts, size) if remaining_parts else 0
            if piece < len(remaining_parts) and remaining_parts[piece] <= block_size:
                block_size = remaining_parts.pop(piece)
            elif block_size == UNLIMITED:
                return None
            else:
                taken.add(place)
            remaining = block_size - size
            if remaining > SMALL_SIZE:
                insort(remaining_parts, remaining)
                total += size
            else:
                total += block_size
                unrequested += remaining
        return total, unrequested

    def empty_cache(self, *, below: int = UNLIMITED) -> None:
        """Returns unused segments of streams `below` a number to CUDA, as `torch.cuda.empty_cache` does."""
        for pool in (pool for (_, stream), pool in self._pools.items() if stream < below):
            for block in list(pool.blocks.values()):
                if pool.expandable:
                    self._shrink(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def switch_stream(self) -> None:
        """The first stream is another one from now on: free blocks of the one before are not used."""
        before = -1 - len(self._pools)
        for small in (False, True):
            if (small, 0) in self._pools:
                self._pools[small, before] = self._pools.pop((small, 0))
        self._large = self._pool(LARGE_SEGMENT, 0)

    def _pool(self, size: int, stream: int) -> _Pool:
        key = (size <= SMALL_SIZE, stream)
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0], expandable=self._settings.expandable_segments)
        return self._pools[key]

    def _free_block(self, pool: _Pool, size: int) -> _Block | None:
        """Removes the best free block for a request from the pool and returns it; None if a new segment is needed."""
        best = pool.best_fit(size)
        limit, rounding = self._max_split, self._settings.non_split_rounding_bytes
        if best is None or size < limit <= best.size or (size >= limit and best.size >= size + rounding):
            return None
        pool.remove(best)
        return best

    def _segment(self, pool: _Pool, size: int) -> _Block:
        if size <= SMALL_SIZE:
            length = SMALL_SEGMENT
        elif size < MIN_LARGE_ALLOCATION:
            length = LARGE_SEGMENT
        else:
            length = round_up(size, ROUND_LARGE)
        if self._limited:
            self._make_room(lambda: length)
        block = _Block(pool, self._next_segment, length)
        self._next_segment += length + LARGE_SEGMENT  # a gap, because segments of cudaMalloc are not merged
        self._reserve(length)
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Adds pages to the end of the expandable segment, merged with a free block before them."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        if self._limited:
            self._make_room(lambda: round_up(size - (pool.tail.size if pool.tail is not None and pool.tail.free else 0), page))
        last = pool.tail
        if last is None:
            last = _Block(pool, self._next_segment, 0)
            self._next_segment += 1 << 44
        elif last.free:
            pool.remove(last)
        else:
            fresh = _Block(pool, last.address + last.size, 0)
            fresh.before, last.after = last, fresh
            last = fresh
        more = round_up(size - last.size, page)
        last.size += more
        pool.tail = last
        self._reserve(more)
        return last

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

    def _split(self, block: _Block, size: int) -> None:
        remaining = _Block(block.pool, block.address + size, block.size - size)
        remaining.before, remaining.after = block, block.after
        if block.after is not None:
            block.after.before = remaining
        block.after = remaining
        block.size = size
        if block.pool.tail is block:
            block.pool.tail = remaining
        block.pool.add(remaining)

    def _merge(self, block: _Block, neighbour: _Block) -> None:
        """Merges the free `neighbour` into `block`."""
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
        if block.pool.tail is neighbour:
            block.pool.tail = block

    def _shrink(self, pool: _Pool, block: _Block) -> None:
        """Unmaps unused pages at the end of an expandable segment. Unused pages in the middle are rare and stay mapped."""
        if block is not pool.tail:
            return
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        pages = block.size // page * page
        pool.remove(block)
        block.size -= pages
        self.reserved_bytes -= pages
        if block.size:
            pool.add(block)
        else:
            pool.tail = block.before
            if block.before is not None:
                block.before.after = None
