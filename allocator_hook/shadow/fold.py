"""A trace -> the memory figures of its rank, as PyTorch's allocator would report them, and what was in use over the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from analyzer.memory.allocator.caching_allocator import AllocatorSettings, CachingAllocator
from analyzer.trace.events import Allocation, Free, Label, Mark, Role
from analyzer.trace.reader import read_trace


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one rank, in bytes."""

    allocated_bytes: int
    """After the last optimizer step."""
    peak_allocated_first_iteration_bytes: int
    """From the start to the end of the first iteration."""
    peak_allocated_bytes: int
    """Over all iterations."""
    peak_at: str
    peak_reserved_bytes: int
    after_step: Mapping[Role | None, int]
    """Of `allocated_bytes`, by the role that labels give; None is what has no label."""
    at_peak: Mapping[Role | None, int]


def fold(path: Path, settings: AllocatorSettings = AllocatorSettings()) -> Usage:  # noqa: B008  (frozen)
    """Replays the trace at `path` through a model of the caching allocator."""
    replay = _Replay(settings)
    for event in read_trace(path):
        replay.take(event)
    return replay.usage()


class _Replay:
    def __init__(self, settings: AllocatorSettings) -> None:
        self._allocator = CachingAllocator(settings)
        self._live: dict[int, tuple[int, int, Role | None]] = {}
        """Address in the model, bytes of its block and role, by pointer in the trace."""
        self._totals: Counter[Role | None] = Counter()
        self._where = "start"
        self._peak = 0
        self._peak_at = ""
        self._at_peak: dict[Role | None, int] = {}
        self._first_peak = 0
        self._iteration = -1

    def take(self, event: object) -> None:
        if isinstance(event, Allocation):
            self._allocate(event)
        elif isinstance(event, Free):
            address, size, role = self._live.pop(event.pointer)
            self._totals[role] -= size
            self._allocator.free(address)
        elif isinstance(event, Mark):
            self._where = _describe(event)
            self._iteration = max(self._iteration, event.iteration)
        elif isinstance(event, Label) and event.pointer in self._live:
            address, size, role = self._live[event.pointer]
            self._live[event.pointer] = (address, size, event.role)
            self._totals[role] -= size
            self._totals[event.role] += size

    def _allocate(self, event: Allocation) -> None:
        before = self._allocator.allocated_bytes
        address = self._allocator.malloc(event.bytes, stream=event.stream)
        size = self._allocator.allocated_bytes - before
        self._live[event.pointer] = (address, size, None)
        self._totals[None] += size
        if self._iteration <= 0:
            self._first_peak = self._allocator.peak_allocated_bytes
        if self._allocator.allocated_bytes > self._peak:
            self._peak = self._allocator.allocated_bytes
            self._peak_at = self._where
            self._at_peak = dict(self._totals)

    def usage(self) -> Usage:
        return Usage(
            allocated_bytes=self._allocator.allocated_bytes,
            peak_allocated_first_iteration_bytes=self._first_peak,
            peak_allocated_bytes=self._peak,
            peak_at=self._peak_at,
            peak_reserved_bytes=self._allocator.peak_reserved_bytes,
            after_step={role: size for role, size in self._totals.items() if size},
            at_peak={role: size for role, size in self._at_peak.items() if size},
        )


def _describe(mark: Mark) -> str:
    parts = [mark.phase if mark.kind == "enter" else f"after {mark.phase}"]
    if mark.microbatch >= 0:
        parts.append(f"of microbatch {mark.microbatch}")
    return " ".join(parts) + (f", {mark.name}" if mark.name else "")


def timeline(path: Path) -> Iterator[tuple[int, int]]:
    """(nanoseconds, bytes in use) at every event that changes them, in blocks as requested."""
    held: dict[int, int] = {}
    total = 0
    for event in read_trace(path):
        if isinstance(event, Allocation):
            held[event.pointer] = event.bytes
            total += event.bytes
        elif isinstance(event, Free):
            total -= held.pop(event.pointer)
        else:
            continue
        yield event.time_ns, total
