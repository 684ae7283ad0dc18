"""Runs the requests of a script in the simulated caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

from analyzer.memory.allocator.caching_allocator import (
    MIN_BLOCK,
    MIN_LARGE_ALLOCATION,
    POOL_BITS,
    ROUND_LARGE,
    SMALL_SIZE,
    CachingAllocator,
)
from analyzer.memory.allocator.pool import ADDRESS, ADDRESS_BITS, LARGE_SEGMENT
from analyzer.memory.allocator.script import STREAM_BITS, TEMPORARY, Action
from analyzer.modules.tree import LAYER_STREAM, SIDE_STREAM

_SIZE: Final = (1 << STREAM_BITS) - 1


class ScriptAllocator(CachingAllocator):
    """The allocator of a rank, which runs the scripts of its chunks."""

    layer = 0
    """Added to the number of a layer's own stream."""

    def run(self, actions: Sequence[Action], addresses: list[int], first: int = 0) -> None:
        """Runs actions of one microbatch. `addresses` has the address in each slot; `first` is added to their slots."""
        if self._combines:
            self._run_combined(actions, addresses, first)
            return
        for action in actions:
            self._run_one(action, addresses, first)

    def _run_one(self, action: Action, addresses: list[int], first: int) -> None:
        """Runs one action with any settings, on any stream."""
        size, slot, temporaries = action
        if size:
            stream = 0 if size > 0 else SIDE_STREAM + (-size >> STREAM_BITS)
            addresses[slot + first] = self.malloc(abs(size) & _SIZE, stream=stream + (self.layer if stream == LAYER_STREAM else 0))
        elif slot != TEMPORARY:
            self.free(addresses[slot + first])
        else:
            self.malloc_and_free(temporaries)

    def _run_combined(self, actions: Sequence[Action], addresses: list[int], first: int) -> None:
        """The same with the default settings: `malloc` and `free` of the large pool without calls."""
        pool, in_use, excess = self._large, self._in_use, self._unrequested
        keys, starting, ending, segments = pool.keys, pool.starting, pool.ending, pool.segments
        at_once = self._at_once
        allocated, peak, number = self.allocated_bytes, self.peak_allocated_bytes, pool.end >> POOL_BITS
        for size, slot, temporaries in actions:
            if size > SMALL_SIZE:
                size = (size + MIN_BLOCK - 1) & -MIN_BLOCK
                key = size << ADDRESS_BITS
                if keys and keys[-1] >= key:
                    key = keys.pop(bisect_left(keys, key))
                    address, block = key & ADDRESS, key >> ADDRESS_BITS
                    del starting[address]
                    remaining = block - size
                    if not remaining:
                        del ending[address + block]
                else:
                    block = LARGE_SEGMENT if size < MIN_LARGE_ALLOCATION else (size + ROUND_LARGE - 1) & -ROUND_LARGE
                    address = pool.end
                    pool.end += block + LARGE_SEGMENT
                    segments[address] = block
                    self.reserved_bytes += block
                    remaining = block - size
                if remaining:
                    if remaining > SMALL_SIZE:
                        rest = address + size
                        starting[rest] = ending[address + block] = remaining
                        insort(keys, (remaining << ADDRESS_BITS) + rest)
                        block = size
                    else:
                        ending.pop(address + block, None)
                        excess[address] = remaining
                        self.unrequested_bytes += remaining
                in_use[address] = block
                addresses[slot + first] = address
                allocated += block
                if allocated > peak:
                    peak = allocated
                    self.unrequested_at_peak_bytes = self.unrequested_bytes
            elif slot >= 0 and not size and addresses[slot + first] >> POOL_BITS == number:
                address = addresses[slot + first]
                block = in_use.pop(address)
                allocated -= block
                if address in excess:
                    self.unrequested_bytes -= excess.pop(address)
                pool.merge(address, block)
            elif slot == TEMPORARY and temporaries.large and not temporaries.aside:
                if allocated + temporaries.most <= peak and keys and keys[-1] >> ADDRESS_BITS >= temporaries.bytes:
                    continue  # as in `malloc_and_free`
                total, unrequested = at_once(temporaries.sizes)
                if allocated + total > peak:
                    peak = allocated + total
                    self.unrequested_at_peak_bytes = self.unrequested_bytes + unrequested
            else:
                self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
                self._run_one((size, slot, temporaries), addresses, first)
                allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
