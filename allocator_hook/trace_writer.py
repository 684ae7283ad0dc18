"""Write a trace from Python, for the shadow recorder, converters and tests. The CUDA recorder writes its traces in C++."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from analyzer.trace.events import PHASES, Header, KernelCall, Phase, Role
from analyzer.trace.format import (
    ALLOCATION,
    CHECKSUM,
    COLLECTIVE,
    END,
    ENTER,
    FAILED_ALLOCATION,
    FREE,
    HEADER,
    KERNEL,
    LABEL,
    LEAVE,
    RECORD,
    RECORD_BYTES,
    RESIDUE,
    TEXT,
    collective_text,
    header_text,
    kernel_text,
    label_text,
    preamble,
    text_records,
)

BUFFER_BYTES: Final = 1365 * RECORD_BYTES
"""Size of the write buffer: complete records, just under 64 KiB. A killed process loses at most this much."""
_PHASE_CODES: Final = {phase: code for code, phase in enumerate(PHASES)}
_UINT32: Final = 0xFFFFFFFF
_UINT64: Final = 0xFFFFFFFFFFFFFFFF


class _Waiting(NamedTuple):
    """A record that is not in the buffer yet."""

    kind: int
    flags: int
    device: int
    pointer: int
    bytes: int
    stream: int
    text: int
    time_ns: int


class TraceWriter:
    """Appends events to a trace and fills in sequence and time. Use it as a context manager, or call `close`.

    The file appears at `path` after its header is written. If `path` ends in .gz, the trace is written to the same path without
    .gz, and `close` compresses it. All methods are thread-safe. Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self._final = Path(path)
        compressed = self._final.suffix == ".gz"
        self.path = self._final.with_suffix("") if compressed else self._final
        """File that the records are written to until `close`."""
        start = preamble() + text_records(HEADER, header_text(header), 0)
        self._sequence = len(start) // RECORD_BYTES - 1
        self._texts: dict[str, int] = {}
        self._buffer = bytearray()
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        unfinished.unlink(missing_ok=True)
        self._file = unfinished.open("xb", buffering=0)  # creates it: a link that somebody has put there is not followed
        try:
            self._file.write(start)
            unfinished.replace(self.path)
        except OSError:
            self._file.close()
            unfinished.unlink(missing_ok=True)
            raise

    def allocation(
        self, pointer: int, bytes: int, device: int = 0, stream: int = 0, failed: bool = False, time_ns: int | None = None
    ) -> None:
        """Record an allocation of `bytes` requested bytes. If `failed`, `pointer` is ignored and recorded as 0."""
        if failed:
            self._append(FAILED_ALLOCATION, 0, device, 0, bytes, stream, 0, time_ns)
        else:
            self._append(ALLOCATION, 0, device, pointer, bytes, stream, 0, time_ns)

    def free(self, pointer: int, device: int = 0, stream: int = 0, time_ns: int | None = None) -> None:
        """Record that the allocation at `pointer` is freed."""
        self._append(FREE, 0, device, pointer, 0, stream, 0, time_ns)

    def enter(self, name: str, phase: Phase, microbatch: int = -1, iteration: int = -1, time_ns: int | None = None) -> None:
        """Record that the module `name` is entered."""
        self._mark(ENTER, name, phase, microbatch, iteration, time_ns)

    def leave(self, name: str, phase: Phase, microbatch: int = -1, iteration: int = -1, time_ns: int | None = None) -> None:
        """Record that the module `name` is left."""
        self._mark(LEAVE, name, phase, microbatch, iteration, time_ns)

    def collective(
        self,
        kind: str,
        *,
        group: str,
        shape: Sequence[int],
        dtype: str,
        bytes: int,
        members: Sequence[int] = (),
        size: int | None = None,
        phase: Phase | None = None,
        peer: int | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Record one call of a collective. `bytes` is its payload on this rank; `size` defaults to the number of members."""
        text = collective_text(kind=kind, group=group, members=members, size=size, shape=shape, dtype=dtype, phase=phase, peer=peer)
        self._append(COLLECTIVE, 0, 0, 0, bytes, 0, self._text(text), time_ns)

    def label(
        self, pointer: int, role: Role, name: str, *, shape: Sequence[int], dtype: str, bytes: int, time_ns: int | None = None
    ) -> None:
        """Record that the tensor `name` is at `pointer`, an address inside a live allocation."""
        text = label_text(role=role, name=name, shape=shape, dtype=dtype)
        self._append(LABEL, 0, 0, pointer, bytes, 0, self._text(text), time_ns)

    def kernel(self, call: KernelCall, time_ns: int | None = None) -> None:
        """Record a GEMM or a fused attention kernel. The open marks give its module and phase."""
        self._append(KERNEL, 0, 0, 0, 0, 0, self._text(kernel_text(call)), time_ns)

    def flush(self) -> None:
        """Write all buffered records to the file."""
        with self._lock:
            self._write_out()

    def close(self) -> None:
        """Write the end record, and compress the file if its path ends in .gz. A second call does nothing."""
        if self._file.closed:
            return
        try:
            self._append(END, 0, 0, 0, 0, 0, 0, None)
            self.flush()
        finally:
            self._file.close()
        if self.path != self._final:
            compress(self.path, self._final)
            self.path.unlink()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the trace. After an error it is removed, because it would look like a complete one."""
        if error is None:
            self.close()
        else:
            self._file.close()
            self.path.unlink(missing_ok=True)

    def _mark(self, kind: int, name: str, phase: Phase, microbatch: int, iteration: int, time_ns: int | None) -> None:
        code = _PHASE_CODES[phase]
        self._append(kind, code, 0, microbatch & _UINT64, iteration & _UINT64, 0, self._text(name), time_ns)

    def _text(self, text: str) -> int:
        with self._lock:
            number = self._texts.get(text)
            if number is None:
                number = self._texts[text] = len(self._texts)
                records = text_records(TEXT, text, self._sequence)
                self._sequence += len(records) // RECORD_BYTES
                self._buffer += records
            return number

    def _append(
        self, kind: int, flags: int, device: int, pointer: int, bytes: int, stream: int, text: int, time_ns: int | None
    ) -> None:
        now = time.monotonic_ns() if time_ns is None else time_ns
        self._waiting.append(_Waiting(kind, flags, device, pointer, bytes, stream, text, now))
        # a garbage collection while the lock is held frees tensors: their records are written by the call that holds it
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                while self._waiting:
                    self._write(self._waiting.popleft())
            finally:
                self._lock.release()

    def _write(self, waiting: _Waiting) -> None:
        kind, flags, device, pointer, bytes, stream, text, now = waiting
        record = RECORD.pack(kind, flags, device, self._sequence & _UINT32, now, pointer, bytes, stream, text)
        self._sequence += 1
        self._buffer += record
        self._buffer += CHECKSUM.pack(zlib.crc32(record, RESIDUE))
        if len(self._buffer) >= BUFFER_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        pending = memoryview(self._buffer)
        while pending:
            pending = pending[self._file.write(pending) :]
        self._buffer = bytearray()


def compress(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Compress the finished trace at `path` to `target` with gzip. The reader detects the compression."""
    with open(path, "rb") as source, gzip.open(target, "wb", compresslevel=6) as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
