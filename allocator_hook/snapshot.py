"""Convert a PyTorch memory snapshot (torch.cuda.memory._dump_snapshot) into a trace: `python -m allocator_hook.snapshot IN OUT`.

A snapshot is a pickle, and a pickle can contain code. No code is executed: snapshots consist only of lists, dicts, strings and
numbers, and a pickle that references any class or function is rejected.

Conversion of the entries recorded by c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.1 and later): `alloc` has the requested bytes.
`free_requested` is the free: the tensor is deleted and the allocator stops counting its memory. `oom` is a failed allocation.
Allocations from before the history started are written first: blocks that are freed but not allocated in the history, and blocks
that are active at the end but do not appear in it. Limitation: if the history overflowed (max_entries), older events are missing.
"""

from __future__ import annotations

import heapq
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from allocator_hook.trace_writer import TraceWriter
from analyzer.errors import AnalyzerError
from analyzer.trace.events import Header, TraceError

_ACTIONS: Final[dict[str, Literal["allocation", "free", "failed"]]] = {
    "alloc": "allocation",
    "free_requested": "free",
    "oom": "failed",
}
_BROKEN_PICKLE: Final = (
    pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    time_ns: int
    device: int
    kind: Literal["allocation", "free", "failed"]
    pointer: int
    bytes: int
    stream: int


class _DataOnly(pickle.Unpickler):
    """Loads builtin containers, strings and numbers only. Any class or function is rejected before it is imported."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it references {module_name}.{global_name}, but a snapshot contains only data")


def convert_snapshot(source: str | os.PathLike[str], target: str | os.PathLike[str], *, argv: Sequence[str] = ()) -> None:
    """Write the snapshot at `source` as a trace to `target`. `argv` is the launch command of the snapshot, if known.

    Raises TraceError if `source` is not a snapshot or contains more than data, OSError if a file cannot be read or written.
    """
    path = Path(source)
    snapshot = _load(path)
    try:
        devices = [_steps(trace, device) for device, trace in enumerate(snapshot["device_traces"])]
        segments = snapshot["segments"]
        before = [_held_before(steps, device, segments) for device, steps in enumerate(devices)]
        reserved = sum(_natural(segment, "total_size") for segment in segments)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_snapshot(path, 0, f"{type(error).__name__}: {error}") from error
    with TraceWriter(target, Header(recorder="snapshot", argv=tuple(argv), extra={"reserved_bytes": reserved})) as writer:
        for step in (*(step for held in before for step in held), *_in_order_of_time(devices)):
            if step.kind == "free":
                writer.free(step.pointer, step.device, step.stream, time_ns=step.time_ns)
            else:
                failed = step.kind == "failed"
                writer.allocation(step.pointer, step.bytes, step.device, step.stream, failed=failed, time_ns=step.time_ns)


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        try:
            snapshot = _DataOnly(file).load()
        except _BROKEN_PICKLE as error:
            raise _no_snapshot(path, file.tell(), str(error) or type(error).__name__) from error
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise _no_snapshot(path, 0, "it has no segments or no device_traces")
    return snapshot


def _no_snapshot(path: Path, offset: int, why: str) -> TraceError:
    return TraceError(path, offset, f"not a PyTorch memory snapshot ({why})", "give a file from torch.cuda.memory._dump_snapshot")


def _steps(trace: Iterable[dict[str, Any]], device: int) -> list[_Step]:
    """Return the allocations and frees of one device. Other entries (segments, snapshots) are skipped."""
    return [
        _Step(
            time_ns=1000 * _natural(entry, "time_us", 0),
            device=device,
            kind=_ACTIONS[entry["action"]],
            pointer=_natural(entry, "addr", 0),
            bytes=_natural(entry, "size"),
            stream=_natural(entry, "stream", 0),
        )
        for entry in trace
        if entry["action"] in _ACTIONS
    ]


def _held_before(steps: Sequence[_Step], device: int, segments: Iterable[dict[str, Any]]) -> list[_Step]:
    """Return the allocations from before the history of `device` starts. They get the time of its first event."""
    start = steps[0].time_ns if steps else 0
    live: set[int] = set()
    before: dict[int, _Step] = {}
    for step in steps:
        if step.kind == "allocation":
            live.add(step.pointer)
        elif step.kind == "free" and step.pointer in live:
            live.remove(step.pointer)
        elif step.kind == "free":
            before.setdefault(step.pointer, _Step(start, device, "allocation", step.pointer, step.bytes, step.stream))
    for pointer, size, stream in _active_blocks(device, segments):
        if pointer not in live:
            before.setdefault(pointer, _Step(start, device, "allocation", pointer, size, stream))
    return list(before.values())


def _active_blocks(device: int, segments: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield (address, requested bytes, stream) of each block of `device` that is allocated when the snapshot is taken."""
    for segment in segments:
        if _natural(segment, "device", 0) != device:
            continue
        address = _natural(segment, "address")
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, _natural(block, "requested_size", _natural(block, "size")), _natural(segment, "stream", 0)
            address += _natural(block, "size")


def _in_order_of_time(devices: Sequence[Sequence[_Step]]) -> Iterator[_Step]:
    return heapq.merge(*devices, key=lambda step: step.time_ns)


def _natural(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return field `name` as an integer from 0 to 2^53 - 1.

    Raises KeyError if it is missing and has no default, ValueError if it is not such an integer.
    """
    value = fields[name] if default is None else fields.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{name} is {value!r}")
    return value


def main(arguments: Sequence[str]) -> int:
    """Convert a snapshot and return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m allocator_hook.snapshot SNAPSHOT TRACE", file=sys.stderr)
        return AnalyzerError.exit_code
    try:
        convert_snapshot(arguments[0], arguments[1])
    except (AnalyzerError, OSError) as error:
        print(f"snapshot: {error}", file=sys.stderr)
        return AnalyzerError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
