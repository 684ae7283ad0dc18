"""Convert a trace for PyTorch's memory visualizer: `python -m allocator_hook.visualizer TRACE OUT.pickle`.

The output has the format of torch.cuda.memory._dump_snapshot; open it on https://pytorch.org/memory_viz. In place of the Python
call stack it has the stack of running modules: `forward:0:decoder.layers.0.mlp` is the phase, the microbatch and the module.
Labelled tensors are coloured by their role.

The visualizer (torch/utils/viz/MemoryViz.js) requires that every address is in a segment, and a trace has no segments. The
segments of the output are the address ranges of the allocations, merged if they are adjacent. They are not the memory that the
caching allocator reserved.
"""

from __future__ import annotations

import os
import pickle
import sys
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from analyzer.errors import AnalyzerError
from analyzer.trace.reader import Allocation, Free, Label, Mark, Trace, read_complete_trace

_ALLOW_TRUNCATED: Final = "--info-allow-truncated"
PROTOCOL: Final = 4
"""The highest pickle protocol that the visualizer supports."""
_UNKNOWN: Final = "unknown"

Entry = dict[str, Any]
Frames = list[dict[str, Any]]


@dataclass(slots=True)
class _Device:
    """The output entries of one device, and its live allocations."""

    entries: list[Entry] = field(default_factory=list)
    live: dict[int, Entry] = field(default_factory=dict)
    pointers: list[int] = field(default_factory=list)
    """The keys of `live`, sorted."""

    def allocate(self, event: Allocation, frames: Frames) -> None:
        if event.pointer in self.live:  # its free was not recorded
            self.free(event.pointer, event.time_ns, frames)
        entry = _entry("alloc", event.pointer, event.bytes, event.stream, event.time_ns, frames)
        self.entries.append(entry)
        self.live[event.pointer] = entry
        insort(self.pointers, event.pointer)

    def fail(self, event: Allocation, frames: Frames) -> None:
        self.entries.append(_entry("oom", 0, event.bytes, event.stream, event.time_ns, frames) | {"device_free": 0})

    def free(self, pointer: int, time_ns: int, frames: Frames) -> None:
        allocation = self.live.pop(pointer, None)
        if allocation is None:  # allocated before the trace
            return
        self.pointers.pop(bisect_right(self.pointers, pointer) - 1)
        size, stream = allocation["size"], allocation["stream"]
        self.entries.append(_entry("free_requested", pointer, size, stream, time_ns, frames))
        self.entries.append(_entry("free_completed", pointer, size, stream, time_ns, frames))

    def label(self, event: Label) -> bool:
        """Set the role of the allocation that contains the tensor; return False if this device does not have it.

        If an allocation has several labels, the first one is used.
        """
        at = bisect_right(self.pointers, event.pointer) - 1
        if at < 0:
            return False
        allocation = self.live[self.pointers[at]]
        if event.pointer > self.pointers[at] + allocation["size"]:
            return False
        allocation.setdefault("category", event.role)
        return True


def write_visualizer(trace: Trace, target: str | os.PathLike[str]) -> None:
    """Write `trace` to `target`. Frees without a recorded allocation are omitted. Raises TraceError, OSError."""
    Path(target).write_bytes(pickle.dumps(snapshot_of(trace), protocol=PROTOCOL))


def snapshot_of(trace: Trace) -> dict[str, Any]:
    """Return `trace` in the format of torch.cuda.memory._snapshot()."""
    devices: dict[int, _Device] = {0: _Device()}
    marks: list[Mark] = []
    frames = _frames(marks)
    for event in trace:
        if isinstance(event, Mark):
            _follow(marks, event)
            frames = _frames(marks)
        elif isinstance(event, Allocation):
            device = devices.setdefault(max(event.device, 0), _Device())
            (device.fail if event.failed else device.allocate)(event, frames)
        elif isinstance(event, Free):
            devices.setdefault(max(event.device, 0), _Device()).free(event.pointer, event.time_ns, frames)
        elif isinstance(event, Label):
            any(device.label(event) for device in devices.values())
    _fill_categories(list(devices.values()))
    return {
        "segments": [segment for number, device in sorted(devices.items()) for segment in _segments(number, device)],
        "device_traces": [devices[number].entries if number in devices else [] for number in range(max(devices) + 1)],
    }


def _entry(action: str, pointer: int, size: int, stream: int, time_ns: int, frames: Frames) -> Entry:
    return {"action": action, "addr": pointer, "size": size, "stream": stream, "time_us": time_ns // 1000, "frames": frames}


def _follow(marks: list[Mark], event: Mark) -> None:
    """Apply a mark to the stack of running modules.

    Leaving a module also leaves the modules inside it that have no leave mark, for example after an exception.
    """
    if event.kind == "enter":
        marks.append(event)
        return
    for depth in reversed(range(len(marks))):
        if marks[depth].name == event.name:
            del marks[depth:]
            return


def _frames(marks: Sequence[Mark]) -> Frames:
    """Return the running modules, innermost first. The visualizer shows a frame as filename:line:name."""
    if not marks:
        return [{"filename": "outside", "line": 0, "name": "any module"}]
    return [{"filename": mark.phase, "line": mark.microbatch, "name": mark.name or mark.phase} for mark in reversed(marks)]


def _fill_categories(devices: Sequence[_Device]) -> None:
    """Give every entry a category if at least one has one. The visualizer fails if no entry has the category 'unknown'."""
    entries = [entry for device in devices for entry in device.entries]
    if not any("category" in entry for entry in entries):
        return
    for entry in entries:
        entry.setdefault("category", _UNKNOWN)
    end = _entry("snapshot", 0, 0, 0, entries[-1]["time_us"] * 1000, []) | {"category": _UNKNOWN}
    next(device for device in devices if device.entries).entries.append(end)


def _segments(number: int, device: _Device) -> Iterator[dict[str, Any]]:
    """Yield the address ranges of all allocations of a device, with the blocks that are live in them at the end."""
    spans: list[list[int]] = []
    for start, end in sorted({(e["addr"], e["addr"] + e["size"]) for e in device.entries if e["action"] == "alloc"}):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    for start, end in spans:
        inside = device.pointers[bisect_right(device.pointers, start - 1) : bisect_right(device.pointers, end - 1)]
        allocated = sum(device.live[pointer]["size"] for pointer in inside)
        yield {
            "device": number,
            "address": start,
            "total_size": end - start,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": allocated,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": list(_blocks(start, end, [device.live[pointer] for pointer in inside])),
        }


def _blocks(start: int, end: int, live: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Yield blocks, active and inactive, that cover the address range without gaps."""
    at = start
    for entry in live:
        if entry["addr"] > at:
            yield _block("inactive", at, entry["addr"] - at, [])
        yield _block("active_allocated", entry["addr"], entry["size"], entry["frames"])
        at = entry["addr"] + entry["size"]
    if at < end:
        yield _block("inactive", at, end - at, [])


def _block(state: str, address: int, size: int, frames: Frames) -> dict[str, Any]:
    return {"state": state, "address": address, "size": size, "requested_size": size, "frames": frames}


def main(arguments: Sequence[str]) -> int:
    """Convert a trace and return the exit code."""
    paths = [each for each in arguments if each != _ALLOW_TRUNCATED]
    if len(paths) != 2:
        print(f"usage: python -m allocator_hook.visualizer TRACE SNAPSHOT [{_ALLOW_TRUNCATED}]", file=sys.stderr)
        return AnalyzerError.exit_code
    try:
        trace = read_complete_trace(paths[0], allow_truncated=len(paths) < len(arguments))
        write_visualizer(trace, paths[1])
    except (AnalyzerError, OSError) as error:
        print(f"visualizer: {error}", file=sys.stderr)
        return AnalyzerError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
