"""Reads a trace of a training step. allocator_hook/FORMAT.md describes the file format.

The complete file is checked when it is opened, with one CRC-32 call per 3 MiB. Events are decoded during iteration. The file is
mapped into memory, or decompressed into memory if it is compressed: ten million events take 480 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from analyzer.trace import format as fmt
from analyzer.trace.events import (
    PHASES,
    ROLES,
    Allocation,
    CollectiveEvent,
    Event,
    Free,
    Header,
    KernelEvent,
    Label,
    Mark,
    Phase,
    Recorder,
    Role,
    TraceError,
)
from analyzer.trace.integrity import Contents, check
from analyzer.trace.source import load

__all__ = [
    "PHASES",
    "ROLES",
    "Allocation",
    "CollectiveEvent",
    "Columns",
    "Event",
    "Free",
    "Header",
    "KernelEvent",
    "Label",
    "Mark",
    "Phase",
    "Recorder",
    "Role",
    "Trace",
    "TraceError",
    "read_complete_trace",
    "read_trace",
]

_SIGN_BIT: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Columns:
    """All records of a trace as columns of equal length, without copies. Element i belongs to the record with sequence i.

    `kind` has the numbers of analyzer.trace.format (ALLOCATION, FREE, ...). FORMAT.md describes the other fields by kind.
    Skip records of unknown kinds and text records.
    """

    kind: memoryview
    flags: memoryview
    device: memoryview
    time_ns: memoryview
    pointer: memoryview
    bytes: memoryview
    stream: memoryview
    text: memoryview


class Trace:
    """The header and the events of a trace. Iteration yields the events in recording order and can be repeated.

    `truncated`: the recorder did not finish, for example because it was killed or the disk was full. All events are valid.
    `skipped`: the number of records whose kind this version does not know.
    `texts`: the names and descriptions of the file, by number.
    """

    def __init__(self, path: Path, header: Header, contents: Contents) -> None:
        self.path = path
        self.header = header
        self.truncated = contents.truncated
        self.skipped = contents.skipped
        self.texts = contents.texts
        self._events = contents.events
        self._records = contents.records

    def __len__(self) -> int:
        """The number of events."""
        return self._events

    def __iter__(self) -> Iterator[Event]:
        """Yield the events. Raises TraceError for a valid record with invalid contents, which only a faulty writer creates."""
        for sequence, record in enumerate(fmt.WHOLE_RECORD.iter_unpack(self._records)):
            kind, _, device, _, time_ns, pointer, size, stream, _, _ = record
            if kind == fmt.ALLOCATION:
                yield Allocation(sequence, time_ns, pointer, size, device, stream, False)
            elif kind == fmt.FREE:
                yield Free(sequence, time_ns, pointer, device, stream)
            elif kind in fmt.EVENT_KINDS:
                try:
                    yield self._rare_event(sequence, record)
                except (IndexError, ValueError, KeyError, TypeError, RecursionError) as error:
                    offset = fmt.RECORD_BYTES * (1 + sequence)
                    fault = f"a record with invalid contents ({error!r})"
                    raise TraceError(self.path, offset, fault, "fix the program that wrote it") from error

    def _rare_event(self, sequence: int, record: tuple[int, ...]) -> Event:
        kind, flags, device, _, time_ns, pointer, size, stream, text, _ = record
        if kind == fmt.FAILED_ALLOCATION:
            return Allocation(sequence, time_ns, pointer, size, device, stream, True)
        description = self.texts[text]
        if kind == fmt.COLLECTIVE:
            return fmt.collective_event(sequence, time_ns, size, description)
        if kind == fmt.KERNEL:
            return fmt.kernel_event(sequence, time_ns, description)
        if kind == fmt.LABEL:
            return fmt.label_event(sequence, time_ns, pointer, size, description)
        way: Literal["enter", "leave"] = "enter" if kind == fmt.ENTER else "leave"
        return Mark(sequence, time_ns, way, description, PHASES[flags], _signed(pointer), _signed(size))

    @cached_property
    def columns(self) -> Columns:
        """The records as columns, which are faster to process than event objects."""
        longs = self._records.cast("Q")
        return Columns(
            kind=self._records[0 :: fmt.RECORD_BYTES],
            flags=self._records[1 :: fmt.RECORD_BYTES],
            device=self._records.cast("h")[1::24],
            time_ns=longs[1::6],
            pointer=longs[2::6],
            bytes=longs[3::6],
            stream=longs[4::6],
            text=self._records.cast("I")[10::12],
        )


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read and check the trace at `path`, which may be compressed.

    Raises TraceError if the file is not a trace, is damaged, ends inside its header or has another major version; OSError if it
    cannot be read. A truncated trace is not an error; see `Trace.truncated`.
    """
    path = Path(path)
    data, cut_short = load(path)
    header, contents = check(path, data, cut_short=cut_short)
    return Trace(path, header, contents)


def read_complete_trace(path: str | os.PathLike[str], *, allow_truncated: bool = False) -> Trace:
    """Read the trace at `path` as `read_trace` does. A truncated trace raises TraceError too, unless `allow_truncated`."""
    trace = read_trace(path)
    if trace.truncated and not allow_truncated:
        offset = fmt.RECORD_BYTES * (1 + len(trace.columns.kind))
        remedy = "record it again, or give --info-allow-truncated to use the events before"
        raise TraceError(path, offset, "the trace ends here, because its recorder did not finish or the file is cut", remedy)
    return trace


def _signed(word: int) -> int:
    return word - 2 * _SIGN_BIT if word >= _SIGN_BIT else word
