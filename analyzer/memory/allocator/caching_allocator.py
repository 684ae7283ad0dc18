"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved memory for a sequence of requests.

c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.5 to 2.13): `round_size`, `get_allocation_size`, `get_pool`, `get_free_block`,
`should_split`, `free_block`, `try_allocate_expandable_block`. Allocated bytes are those of the blocks in use, which is what
`torch.cuda.memory_allocated` reports: a block of the large pool is not split for a rest of 1 MiB or less, so it can be larger
than what was requested. Reserved bytes are those of the segments allocated with CUDA.

Known limitations: memory is unlimited, so nothing is returned to CUDA to make room; streams do not wait for each other.
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
"""Requests from this size on get a segment of their own."""
ROUND_LARGE: Final = 2 * MIB
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The settings of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) that change sizes."""

    expandable_segments: bool = False
    max_split_bytes: int = _UNLIMITED

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """Reads the environment. Raises UnsupportedError for settings that are not simulated."""
        option = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in environ else "PYTORCH_CUDA_ALLOC_CONF"
        pairs = dict(part.split(":", 1) for part in environ.get(option, "").replace(" ", "").split(",") if ":" in part)
        if "roundup_power2_divisions" in pairs or pairs.get("backend", "native") != "native":
            raise UnsupportedError(
                option, "this allocator setting is not simulated", "leave out roundup_power2_divisions and backend"
            )
        megabytes = pairs.get("max_split_size_mb")
        return cls(
            expandable_segments=pairs.get("expandable_segments", "False").lower() == "true",
            max_split_bytes=int(megabytes) * MIB if megabytes else _UNLIMITED,
        )


class _Block:
    """A piece of a segment. `before` and `after` are its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "size", "unrequested")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.unrequested = 0
        """Bytes beyond those requested, while it is in use."""
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Free blocks of one kind (small or large) and one stream, by size and address."""

    __slots__ = ("addresses", "blocks", "expandable", "sizes", "small", "splits_any_rest", "tail")

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.splits_any_rest = small or expandable
        """Blocks of the large pool stay whole if 1 MiB or less would be left."""
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

    def take(self, block: _Block) -> None:
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
        """The smallest block that is large enough, at the lowest address. A block that can grow counts as unlimited."""
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
    """One device. `malloc` returns an address, `free` takes it back."""

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
        """Of the allocated bytes, those beyond what was requested: blocks that are not split."""
        self.unrequested_at_peak_bytes = 0
        """The same when the allocated bytes were at their peak."""

    def malloc(self, bytes: int, *, stream: int = 0) -> int:
        """An address for `bytes`, which must be positive: PyTorch allocates nothing for empty tensors."""
        if bytes <= 0:
            raise ValueError(f"malloc of {bytes} bytes")
        size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        pool = self._pools.get((size <= SMALL_SIZE, stream)) or self._pool(size, stream)
        # most requests of a new model are larger than every free block
        block = self._free_block(pool, size) if pool.sizes and pool.sizes[-1] >= size else None
        if block is None:
            block = self._grow(pool, size) if pool.expandable else self._segment(pool, size)
        rest = block.size - size
        if rest and (pool.splits_any_rest or (rest > SMALL_SIZE and size < self._max_split)):
            self._split(block, size)
            rest = 0
        address = block.address
        self._in_use[address] = block
        block.unrequested = rest
        self.unrequested_bytes += rest
        self.allocated_bytes = allocated = self.allocated_bytes + size + rest
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.unrequested_at_peak_bytes = allocated, self.unrequested_bytes
        return address

    def free(self, address: int) -> None:
        """Takes back what `malloc` returned. Raises KeyError for any other address."""
        block = self._in_use.pop(address)
        self.allocated_bytes -= block.size
        self.unrequested_bytes -= block.unrequested
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.take(before)
            self._merge(block, before)
        if after is not None and after.free:
            pool.take(after)
            self._merge(block, after)
        pool.add(block)

    def hold(self, bytes: int, count: int) -> None:
        """Allocates `bytes` so many times, for ever. Equal to as many calls of `malloc`, and faster if each needs a segment."""
        size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        length = round_up(size, ROUND_LARGE)
        rest = length - size
        while count:
            pool = self._pools.get((False, 0))
            largest = pool.sizes[-1] if pool is not None and pool.sizes else 0
            if size < MIN_LARGE_ALLOCATION or rest > SMALL_SIZE or largest >= size or self._settings.expandable_segments:
                self.malloc(bytes)
                count -= 1
                continue
            self._next_segment += (length + LARGE_SEGMENT) * count
            self._reserve(length * count)
            self.unrequested_bytes += rest * count
            self.allocated_bytes += length * count
            if self.allocated_bytes > self.peak_allocated_bytes:
                self.peak_allocated_bytes, self.unrequested_at_peak_bytes = self.allocated_bytes, self.unrequested_bytes
            return

    def malloc_and_free(self, sizes: Sequence[int]) -> None:
        """Allocates so many bytes each, and frees all of them again in the same order.

        If free blocks serve all requests, every block is merged again in the end: only the peak can change.
        """
        if self._changes_nothing(sizes):
            return
        found = self._served_by_free_blocks(sizes)
        if found is None:
            for address in [self.malloc(size) for size in sizes]:
                self.free(address)
            return
        total, unrequested = found
        if self.allocated_bytes + total > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes + total
            self.unrequested_at_peak_bytes = self.unrequested_bytes + unrequested

    def _changes_nothing(self, sizes: Sequence[int]) -> bool:
        """Whether one free block is large enough for all of these large requests, and the peak is too high to be reached by them.

        A block is not split for a rest of up to `SMALL_SIZE`, which no further request of the large pool fits in.
        """
        pool = self._pools.get((False, 0))
        if pool is None or not pool.sizes or pool.tail is not None or self._max_split != _UNLIMITED:
            return False
        bytes, count = sum(sizes), len(sizes)
        below_peak = self.allocated_bytes + bytes + count * (SMALL_SIZE + MIN_BLOCK) <= self.peak_allocated_bytes
        return below_peak and pool.sizes[-1] >= bytes + count * MIN_BLOCK and min(sizes) > SMALL_SIZE

    def _served_by_free_blocks(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Bytes of the blocks that would serve these large requests, and those not requested; None if new segments are needed."""
        pool = self._pools.get((False, 0))
        if pool is None or pool.tail is not None or self._max_split != _UNLIMITED or min(sizes) <= SMALL_SIZE:
            return None
        taken: dict[int, int] = {}
        rests: list[int] = []  # free pieces of blocks that are split, sorted
        total = unrequested = 0
        for bytes in sizes:
            size = (bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
            place = bisect_left(pool.sizes, size)
            while place < len(pool.sizes) and taken.get(pool.sizes[place], 0) >= len(pool.addresses[pool.sizes[place]]):
                place += 1
            whole = pool.sizes[place] if place < len(pool.sizes) else _UNLIMITED
            piece = bisect_left(rests, size)
            if piece < len(rests) and rests[piece] <= whole:
                whole = rests.pop(piece)
            elif whole == _UNLIMITED:
                return None
            else:
                taken[whole] = taken.get(whole, 0) + 1
            rest = whole - size
            if rest > SMALL_SIZE:
                insort(rests, rest)
                total += size
            else:
                total += whole
                unrequested += rest
        return total, unrequested

    def empty_cache(self) -> None:
        """Returns segments that are completely free to CUDA, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.expandable:
                    self._shrink(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size

    def _pool(self, size: int, stream: int) -> _Pool:
        key = (size <= SMALL_SIZE, stream)
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0], expandable=self._settings.expandable_segments)
        return self._pools[key]

    def _free_block(self, pool: _Pool, size: int) -> _Block | None:
        """Takes the best free block for a request; None if a new segment is needed."""
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
        pool.take(best)
        return best

    def _segment(self, pool: _Pool, size: int) -> _Block:
        if size <= SMALL_SIZE:
            length = SMALL_SEGMENT
        elif size < MIN_LARGE_ALLOCATION:
            length = LARGE_SEGMENT
        else:
            length = round_up(size, ROUND_LARGE)
        block = _Block(pool, self._next_segment, length)
        self._next_segment += length + LARGE_SEGMENT  # segments of cudaMalloc are not merged: leave a gap
        self._reserve(length)
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """More pages at the end of the segment that can grow, merged with a free block before them."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = pool.tail
        if last is None:
            last = _Block(pool, self._next_segment, 0)
            self._next_segment += 1 << 44
        elif last.free:
            pool.take(last)
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
        rest = _Block(block.pool, block.address + size, block.size - size)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        if block.pool.tail is block:
            block.pool.tail = rest
        block.pool.add(rest)

    def _merge(self, block: _Block, neighbour: _Block) -> None:
        """`block` absorbs its free `neighbour`."""
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
        """Unmaps complete pages at the end of the segment; those in the middle are rare and kept."""
        if block is not pool.tail:
            return
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        pages = block.size // page * page
        pool.take(block)
        block.size -= pages
        self.reserved_bytes -= pages
        if block.size:
            pool.add(block)
        else:
            pool.tail = block.before
            if block.before is not None:
                block.before.after = None
