"""A trace replayed through PyTorch's caching allocator: memory of the recorded rank, and what was in use over the step.

Kinds: parameter, gradient and optimizer by their labels; of the rest, activation is what a forward made and a backward
freed, workspace what an iteration made and kept, temporary anything else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from analyzer.memory.allocator.caching_allocator import AllocatorSettings, CachingAllocator
from analyzer.results import Timeline
from analyzer.trace.events import Allocation, Free, Label, Mark
from analyzer.trace.reader import Trace

KINDS: Final = ("parameter", "gradient", "optimizer", "workspace", "activation", "temporary")
POINTS: Final = 200
"""Of a timeline."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What PyTorch's statistics would say of the recorded rank."""

    allocated: int
    """After the last iteration."""
    peak_first_iteration: int
    peak: int
    """From the start to the end."""
    peak_at: str
    peak_reserved: int
    after: dict[str, int]
    """Of `allocated`, by kind."""
    at_peak: dict[str, int]
    timeline: Timeline


def replay(trace: Trace, settings: AllocatorSettings) -> Replayed:
    """Two walks: the first learns what becomes of each allocation, the second replays them."""
    kinds, changes, start = _kinds(trace)
    allocator = CachingAllocator(settings)
    live: dict[int, tuple[int, int, str]] = {}
    totals: Counter[str] = Counter()
    stretch = max(1, -(-(changes - start) // POINTS))
    points: list[tuple[int, ...]] = []
    fullest: tuple[int, tuple[int, ...]] = (-1, ())
    peak = first_peak = index = 0
    where = peak_at = "the start"
    at_peak: dict[str, int] = {}
    iteration = -1
    for event in trace:
        if isinstance(event, Mark):
            iteration = max(iteration, event.iteration)
            if event.kind == "enter":
                where = _describe(event)
            continue
        if isinstance(event, Allocation) and not event.failed:
            before = allocator.allocated_bytes
            address = allocator.malloc(event.bytes, stream=event.stream)
            size = allocator.allocated_bytes - before
            live[event.pointer] = (address, size, kinds[index])
            totals[kinds[index]] += size
            if allocator.allocated_bytes > peak:
                peak, peak_at, at_peak = allocator.allocated_bytes, where, dict(totals)
            if iteration <= 0:
                first_peak = allocator.peak_allocated_bytes
        elif isinstance(event, Free) and event.pointer in live:
            address, size, kind = live.pop(event.pointer)
            totals[kind] -= size
            allocator.free(address)
        else:
            continue
        index += 1
        if index > start:
            if allocator.allocated_bytes > fullest[0]:
                fullest = (allocator.allocated_bytes, tuple(totals[kind] for kind in KINDS))
            if (index - start) % stretch == 0:
                points.append(fullest[1])
                fullest = (-1, ())
    if fullest[1]:
        points.append(fullest[1])
    return Replayed(
        allocated=allocator.allocated_bytes,
        peak_first_iteration=first_peak,
        peak=peak,
        peak_at=peak_at,
        peak_reserved=allocator.peak_reserved_bytes,
        after={kind: totals[kind] for kind in KINDS},
        at_peak={kind: at_peak.get(kind, 0) for kind in KINDS},
        timeline=Timeline(kinds=KINDS, points=tuple(points)),
    )


def _kinds(trace: Trace) -> tuple[dict[int, str], int, int]:
    """The kind of each allocation by its place among allocations and frees, how many there are, where the last iteration begins."""
    kinds: dict[int, str] = {}
    live: dict[int, tuple[int, str, int]] = {}
    phase, iteration, index, start = "", -1, 0, 0
    for event in trace:
        if isinstance(event, Mark):
            if event.iteration > iteration:
                iteration, start = event.iteration, index
            if event.kind == "enter":
                phase = event.phase
        elif isinstance(event, Label):
            if event.pointer in live and event.role in KINDS:
                kinds[live[event.pointer][0]] = event.role
        elif isinstance(event, Allocation) and not event.failed:
            live[event.pointer] = (index, phase, iteration)
            index += 1
        elif isinstance(event, Free) and event.pointer in live:
            made, made_in, _ = live.pop(event.pointer)
            kept = made_in == "forward" and phase in ("backward", "recompute")
            kinds.setdefault(made, "activation" if kept else "temporary")
            index += 1
    for made, _, made_at in live.values():
        kinds.setdefault(made, "workspace" if made_at >= 0 else "temporary")
    return kinds, index, start


def _describe(mark: Mark) -> str:
    parts: list[str] = [mark.phase]
    if mark.microbatch >= 0:
        parts.append(f"of microbatch {mark.microbatch}")
    return " ".join(parts) + (f", {mark.name}" if mark.name else "")
