"""Replays a trace through a simulation of PyTorch's caching allocator: memory of the recorded rank, and memory over time.

Each allocation has a kind. Parameters, gradients and optimizer states have labels. Other allocations are activations if a forward
allocated and a backward freed them, workspaces if an iteration allocated and never freed them, and temporary otherwise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from analyzer.memory.allocator.caching_allocator import CachingAllocator
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.results import Timeline
from analyzer.trace.events import Allocation, Free, Label, Mark
from analyzer.trace.reader import Trace

KINDS: Final = ("parameter", "gradient", "optimizer", "workspace", "activation", "temporary")
POINTS: Final = 200
"""Maximum number of points of a timeline."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Memory of the recorded rank in bytes, as PyTorch's statistics would report it."""

    allocated: int
    """Allocated bytes after the last iteration."""
    peak_first_iteration: int
    peak: int
    """Peak of the whole trace."""
    peak_at: str
    """Phase, microbatch and module of the peak."""
    peak_reserved: int
    after: dict[str, int]
    """The parts of `allocated` by kind."""
    at_peak: dict[str, int]
    """The parts of `peak` by kind."""
    timeline: Timeline
    """Allocated bytes of the last iteration by kind, in at most `POINTS` points."""


def replay(trace: Trace, settings: AllocatorSettings) -> Replayed:
    """Replay a trace in two passes: the first determines the kind of each allocation, the second replays the events."""
    kinds, changes, start = _kinds(trace)
    allocator = CachingAllocator(settings)
    live: dict[int, tuple[int, int, str]] = {}
    totals: Counter[str] = Counter()
    interval = max(1, -(-(changes - start) // POINTS))
    points: list[tuple[int, ...]] = []
    interval_peak: tuple[int, tuple[int, ...]] = (-1, ())
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
            if allocator.allocated_bytes > interval_peak[0]:
                interval_peak = (allocator.allocated_bytes, tuple(totals[kind] for kind in KINDS))
            if (index - start) % interval == 0:
                points.append(interval_peak[1])
                interval_peak = (-1, ())
    if interval_peak[1]:
        points.append(interval_peak[1])
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
    """Return the kind of each allocation, the number of allocations and frees, and the index where the last iteration starts.

    Allocations and frees are numbered together, and the kinds are keyed by these numbers.
    """
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
            number, allocated_in, _ = live.pop(event.pointer)
            saved = allocated_in == "forward" and phase in ("backward", "recompute")
            kinds.setdefault(number, "activation" if saved else "temporary")
            index += 1
    for number, _, first_iteration in live.values():
        kinds.setdefault(number, "workspace" if first_iteration >= 0 else "temporary")
    return kinds, index, start


def _describe(mark: Mark) -> str:
    parts: list[str] = ["creation of the model" if mark.phase == "build" else mark.phase]
    if mark.microbatch >= 0:
        parts.append(f"of microbatch {mark.microbatch}")
    return " ".join(parts) + (f", {mark.name}" if mark.name else "")
