"""The free blocks of one pool of the simulated allocator, and the memory of its expandable segment.

Source: c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.13): `find_expandable_block`, `try_allocate_expandable_block`, `map_block`,
`release_blocks` and `unmap_block`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from analyzer.units import MIB, round_up

SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
ADDRESS_BITS: Final = 62
"""Addresses are below 2 to this power."""
ADDRESS: Final = (1 << ADDRESS_BITS) - 1


class Pool:
    """The free blocks of one pool (small or large) and one stream. No two of them are adjacent."""

    __slots__ = (
        "always_splits", "end", "ending", "expandable", "first", "keys", "page", "segments", "small", "starting", "unmapped",
    )  # fmt: skip

    def __init__(self, first: int, *, small: bool, expandable: bool) -> None:
        """`first`: the lowest address of the pool."""
        self.small = small
        self.expandable = expandable
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        """By how many bytes an expandable segment grows."""
        self.always_splits = small or expandable
        """False for the large pool without expandable segments, whose blocks are not split if 1 MiB or less would remain."""
        self.keys: list[int] = []
        """The keys of the free blocks, sorted: the size, shifted by `ADDRESS_BITS`, plus the address."""
        self.starting: dict[int, int] = {}
        """The sizes of the free blocks by their addresses."""
        self.ending: dict[int, int] = {}
        """The same by the addresses after their last bytes."""
        self.unmapped: dict[int, int] = {}
        """The sizes of parts without memory inside the expandable segment, by their addresses."""
        self.first = first
        self.end = first
        """The address after the expandable segment, or that of the next segment."""
        self.segments: dict[int, int] = {}
        """The sizes of the segments by their addresses, without expandable ones and those that are never freed."""

    def add(self, address: int, size: int) -> None:
        """Adds a free block that has no free neighbours."""
        self.starting[address] = self.ending[address + size] = size
        insort(self.keys, (size << ADDRESS_BITS) + address)

    def remove(self, address: int, size: int) -> None:
        """Removes a free block."""
        del self.starting[address], self.ending[address + size]
        del self.keys[bisect_left(self.keys, (size << ADDRESS_BITS) + address)]

    def merge(self, address: int, size: int) -> None:
        """Adds a free block, merged with its free neighbours."""
        keys, starting, ending = self.keys, self.starting, self.ending
        end = address + size
        if address in ending:
            before = ending.pop(address)
            address -= before
            del keys[bisect_left(keys, (before << ADDRESS_BITS) + address)]
        if end in starting:
            after = starting.pop(end)
            del keys[bisect_left(keys, (after << ADDRESS_BITS) + end)]
            end += after
        size = end - address
        starting[address] = ending[end] = size
        insort(keys, (size << ADDRESS_BITS) + address)

    @property
    def largest(self) -> int:
        """The size of the largest free block; 0 if there is none."""
        return self.keys[-1] >> ADDRESS_BITS if self.keys else 0

    @property
    def growing(self) -> int:
        """The size of the free block at the end of the expandable segment; 0 if there is none."""
        return self.ending.get(self.end, 0)

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """Address and size of the smallest free block of at least `size` bytes, at the lowest address; None if there is none.

        The last block of an expandable segment counts as unlimited, because it can grow.
        """
        place = bisect_left(self.keys, size << ADDRESS_BITS)
        for key in self.keys[place : place + 2]:
            address, found = key & ADDRESS, key >> ADDRESS_BITS
            if not (self.expandable and address + found == self.end) or key == self.keys[-1]:
                return address, found
        return None

    def take(self, size: int) -> tuple[int, int, int]:
        """Address and size of a block of at least `size` bytes of the expandable segment, and the bytes that are mapped for it."""
        parts = self.parts(size)
        for start, length, mapped in parts:
            if not mapped:
                self.remove(start, length)
            elif start == self.end:
                self.end += mapped
            else:
                del self.unmapped[start]
                if mapped < length:
                    self.unmapped[start + mapped] = length - mapped
        address, length = parts[0][0], sum(mapped or length for _, length, mapped in parts)
        after = self.starting.get(address + length, 0)
        if after:
            self.remove(address + length, after)
        return address, length + after, sum(mapped for _, _, mapped in parts)

    def parts(self, size: int) -> list[tuple[int, int, int]]:
        """Adjacent free blocks and parts without memory for a block: address, size, and mapped bytes, 0 for a free block."""
        for hole in sorted(self.unmapped, key=lambda address: (self.unmapped[address], address)):
            found = self._parts_from(hole - self.ending.get(hole, 0), size)
            if found:
                return found
        return self._parts_from(self.end - self.growing, size)

    def _parts_from(self, address: int, size: int) -> list[tuple[int, int, int]]:
        """The same from an address on; empty if a block in use comes before there is enough."""
        parts: list[tuple[int, int, int]] = []
        while size > 0:
            free, hole = self.starting.get(address), self.unmapped.get(address)
            if free is not None:
                length, mapped = free, 0
            elif hole is not None or address == self.end:
                mapped = round_up(size, self.page)
                length = hole if hole is not None else mapped
                mapped = min(mapped, length)
            else:
                return []
            parts.append((address, length, mapped))
            address += mapped or length
            size -= mapped or length
        return parts

    def unmap(self) -> int:
        """Unmaps the unused pages of the expandable segment (`release_blocks`, `unmap_block`). Returns their bytes."""
        bytes = 0
        for address, size in sorted(self.starting.items()):
            start = self.first + round_up(address - self.first, self.page)
            end = self.first + (address + size - self.first) // self.page * self.page
            if start >= end:
                continue
            self.remove(address, size)
            if start > address:
                self.add(address, start - address)
            if end < address + size:
                self.add(end, address + size - end)
            self.unmapped[start] = end - start
            bytes += end - start
        self._join_unmapped()
        return bytes

    def _join_unmapped(self) -> None:
        """Joins adjacent parts without memory, and those at the end of the segment with what follows it."""
        joined: dict[int, int] = {}
        end = -1
        for address, size in sorted(self.unmapped.items()):
            if address == end:
                start = next(reversed(joined))
                joined[start] += size
            else:
                joined[address] = size
            end = address + size
        if end == self.end:
            self.end, _ = joined.popitem()
        self.unmapped = joined
