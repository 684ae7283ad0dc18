"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved memory for a sequence of requests.

Source: c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.5 to 2.13): `round_size`, `get_allocation_size`, `get_pool`, `get_free_block`,
`should_split`, `free_block`, `try_allocate_expandable_block`. Allocated bytes are the sizes of the blocks in use, as in
`torch.cuda.memory_allocated`. A block of the large pool is not split if 1 MiB or less would remain, so it can be larger than the
request. Reserved bytes are the sizes of the segments allocated with CUDA.

Known limitations: GPU memory is unlimited, so segments are never returned to CUDA to satisfy a request. Streams are not
synchronized.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.units import MIB, round_up

MIN_BLOCK: Final = 512
SMALL_SIZE: Final = 1 * MIB
"""Requests of up to this size use the small pool; `kSmallSize`."""
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
MIN_LARGE_ALLOCATION: Final = 10 * MIB
"""Requests of at least this size get a separate segment."""
ROUND_LARGE: Final = 2 * MIB
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The settings of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) that affect sizes."""

    expandable_segments: bool = False
    max_split_bytes: int = _UNLIMITED

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """Reads the settings from environment variables. Raises UnsupportedError for settings that are not simulated."""
        option = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in environ else "PYTORCH_CUDA_ALLOC_CONF"
        pairs = dict(part.split(":", 1) for part in environ.get(option, "").replace(" ", "").split(",") if ":" in part)
        if "roundup_power2_divisions" in pairs or pairs.get("backend", "native") != "native":
            raise UnsupportedError(option, "this allocator setting is not simulated", "remove roundup_power2_divisions and backend")
        megabytes = pairs.get("max_split_size_mb")
        return cls(
            expandable_segments=pairs.get("expandable_segments", "False").lower() == "true",
            max_split_bytes=int(megabytes) * MIB if megabytes else _UNLIMITED,
        )


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
    """The free blocks of one pool (small or large) and one stream, by size and address."""

    __slots__ = ("addresses", "always_splits", "blocks", "expandable", "sizes", "small", "tail")

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.always_splits = small or expandable
        """False for the large pool without expandable segments, whose blocks are not split if 1 MiB or less would remain."""
        self.sizes: list[int] = []
        """The distinct sizes of free blocks, sorted."""
        self.addresses: dict[int, list[int]] = {}
        """For each size, the addresses of its free blocks, sorted."""
        self.blocks: dict[int, _Block] = {}
        """Free blocks by address."""
        self.tail: _Block | None = None
        """The last block of the expandable segment."""

    def add(self, block: _Block) -> None:
        block.free = True
        size, address = block.size, block.address
        self.blocks[address] = block
        addresses = self.addresses.get(size)
        if addresses is None:
            self.addresses[size] = [address]
            insort(self.sizes, size)
        else:
            insort(addresses, address)

    def remove(self, block: _Block) -> None:
        block.free = False
        size, address = block.size, block.address
        del self.blocks[address]
        addresses = self.addresses[size]
        if len(addresses) == 1:
            del self.addresses[size]
            del self.sizes[bisect_left(self.sizes, size)]
        else:
            del addresses[bisect_left(addresses, address)]

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least `size` bytes, at the lowest address; None if there is none.

        The last block of an expandable segment counts as unlimited, because it can grow.
        """
        place = bisect_left(self.sizes, size)
        if place == len(self.sizes):
            return None
        if self.tail is None:
            return self.blocks[self.addresses[self.sizes[place]][0]]
        last = len(self.sizes) - 1
        for index in range(place, last + 1):
            addresses = self.addresses[self.sizes[index]]
            for position, address in enumerate(addresses):
                block = self.blocks[address]
                if block is not self.tail or (index == last and position == len(addresses) - 1):
                    return block
        return None


class CachingAllocator:
    """The allocator of one device. All sizes are in bytes."""

    def __init__(self, settings: AllocatorSettings = AllocatorSettings()) -> None:
        self._settings = settings
        self._max_split = settings.max_split_bytes
        self._pools: dict[tuple[bool, int], _Pool] = {}
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
        pool = self._pools.get((size <= SMALL_SIZE, stream)) or self._pool(size, stream)
        # most requests of a new model are larger than every free block
        block = self._free_block(pool, size) if pool.sizes and pool.sizes[-1] >= size else None
        if block is None:
            block = self._grow(pool, size) if pool.expandable else self._segment(pool, size)
        remaining = block.size - size
        if remaining and (pool.always_splits or (remaining > SMALL_SIZE and size < self._max_split)):
            self._split(block, size)
            remaining = 0
        address = block.address
        self._in_use[address] = block
        block.unrequested = remaining
        self.unrequested_bytes += remaining
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
            pool = self._pools.get((False, 0))
            largest = pool.sizes[-1] if pool is not None and pool.sizes else 0
            if size < MIN_LARGE_ALLOCATION or remaining > SMALL_SIZE or largest >= size or self._settings.expandable_segments:
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

    def malloc_and_free(self, sizes: Sequence[int]) -> None:
        """Allocates one block for each size, and then frees all of them in the same order.

        If free blocks satisfy all requests, the blocks are merged again at the end, and only the peak can change.
        """
        if self._changes_nothing(sizes):
            return
        found = self._from_free_blocks(sizes)
        if found is None:
            for address in [self.malloc(size) for size in sizes]:
                self.free(address)
            return
        total, unrequested = found
        if self.allocated_bytes + total > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes + total
            self.unrequested_at_peak_bytes = self.unrequested_bytes + unrequested

    def _changes_nothing(self, sizes: Sequence[int]) -> bool:
        """Whether one free block is large enough for all of these large requests, and they cannot raise the peak.

        A block is not split if up to `SMALL_SIZE` bytes would remain: no other request of the large pool fits into them.
        """
        pool = self._pools.get((False, 0))
        if pool is None or not pool.sizes or pool.tail is not None or self._max_split != _UNLIMITED:
            return False
        bytes, count = sum(sizes), len(sizes)
        below_peak = self.allocated_bytes + bytes + count * (SMALL_SIZE + MIN_BLOCK) <= self.peak_allocated_bytes
        return below_peak and pool.sizes[-1] >= bytes + count * MIN_BLOCK and min(sizes) > SMALL_SIZE

    def _from_free_blocks(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Bytes of the free blocks for these large requests, and bytes in excess of them; None if new segments are needed."""
        pool = self._pools.get((False, 0))
        if pool is None or pool.tail is not None or self._max_split != _UNLIMITED or min(sizes) <= SMALL_SIZE:
            return None
        taken: dict[int, int] = {}
        remaining_parts: list[int] = []  # free parts of split blocks, sorted
        total = unrequested = 0
        for bytes in sizes:
            size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
            place = bisect_left(pool.sizes, size)
            while place < len(pool.sizes) and taken.get(pool.sizes[place], 0) >= len(pool.addresses[pool.sizes[place]]):
                place += 1
            block_size = pool.sizes[place] if place < len(pool.sizes) else _UNLIMITED
            piece = bisect_left(remaining_parts, size)
            if piece < len(remaining_parts) and remaining_parts[piece] <= block_size:
                block_size = remaining_parts.pop(piece)
            elif block_size == _UNLIMITED:
                return None
            else:
                taken[block_size] = taken.get(block_size, 0) + 1
            remaining = block_size - size
            if remaining > SMALL_SIZE:
                insort(remaining_parts, remaining)
                total += size
            else:
                total += block_size
                unrequested += remaining
        return total, unrequested

    def empty_cache(self) -> None:
        """Returns unused segments to CUDA, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.expandable:
                    self._shrink(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _pool(self, size: int, stream: int) -> _Pool:
        key = (size <= SMALL_SIZE, stream)
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0], expandable=self._settings.expandable_segments)
        return self._pools[key]

    def _free_block(self, pool: _Pool, size: int) -> _Block | None:
        """Removes the best free block for a request from the pool and returns it; None if a new segment is needed."""
        if pool.tail is None and self._max_split == _UNLIMITED:
            place = bisect_left(pool.sizes, size)
            if place == len(pool.sizes):
                return None
            found = pool.sizes[place]
            addresses = pool.addresses[found]
            block = pool.blocks.pop(addresses[0])
            block.free = False
            if len(addresses) == 1:
                del pool.addresses[found]
                del pool.sizes[place]
            else:
                del addresses[0]
            return block
        best = pool.best_fit(size)
        limit = self._max_split
        if best is None or size < limit <= best.size or (size >= limit and best.size >= size + LARGE_SEGMENT):
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
        block = _Block(pool, self._next_segment, length)
        self._next_segment += length + LARGE_SEGMENT  # a gap, because segments of cudaMalloc are not merged
        self._reserve(length)
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Adds pages to the end of the expandable segment, merged with a free block before them."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
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
