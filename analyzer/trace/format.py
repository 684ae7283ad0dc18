"""Encoding of traces for readers and writers: records, kinds and checksums. allocator_hook/FORMAT.md describes the format."""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

from analyzer.trace.events import (
    FORMAT_VERSION,
    AttentionCall,
    CollectiveEvent,
    GemmCall,
    Header,
    KernelCall,
    KernelEvent,
    Label,
    MemoryCall,
)

MAGIC: Final = b"\x89MEMTRC\n"
GZIP_MAGIC: Final = b"\x1f\x8b"
PREAMBLE: Final = struct.Struct("<8sHHI28x")
"""Magic, major version, minor version, record size in bytes; its CRC-32 follows."""
RECORD: Final = struct.Struct("<BBhIQQQQI")
"""kind, flags, device, sequence, time_ns, pointer, bytes, stream, text; its checksum follows."""
WHOLE_RECORD: Final = struct.Struct("<BBhIQQQQII")
TEXT_PIECE: Final = struct.Struct("<BBhI36s")
"""kind, flags, used bytes, sequence, UTF-8 text; its checksum follows."""
CHECKSUM: Final = struct.Struct("<I")
RECORD_BYTES: Final = RECORD.size + CHECKSUM.size
PIECE_BYTES: Final = 36

HEADER: Final = 1
TEXT: Final = 2
ALLOCATION: Final = 3
FAILED_ALLOCATION: Final = 4
FREE: Final = 5
ENTER: Final = 6
LEAVE: Final = 7
COLLECTIVE: Final = 8
LABEL: Final = 9
END: Final = 10
KERNEL: Final = 11
DIRECTIONS: Final = ("forward", "backward")
_KERNEL_KINDS: Final[dict[type[KernelCall], str]] = {GemmCall: "gemm", AttentionCall: "attention", MemoryCall: "memory"}
EVENT_KINDS: Final = (ALLOCATION, FAILED_ALLOCATION, FREE, ENTER, LEAVE, COLLECTIVE, LABEL, KERNEL)

MORE: Final = 1
"""Flag of a text piece that is followed by another piece of the same text."""

RESIDUE: Final = 0x2144DF1C
"""CRC-32 of any bytes followed by their own CRC-32. It is therefore the CRC-32 of the file after every complete record: one call
checks any number of records, and the checksum of a record does not depend on earlier records."""


def seal(record: bytes) -> bytes:
    """Return `record` (44 bytes) with its checksum, which is the CRC-32 of the file up to here."""
    return record + CHECKSUM.pack(zlib.crc32(record, RESIDUE))


def preamble() -> bytes:
    """Return the first 48 bytes of a file."""
    start = PREAMBLE.pack(MAGIC, *FORMAT_VERSION, RECORD_BYTES)
    return start + CHECKSUM.pack(zlib.crc32(start))


def text_records(kind: int, text: str, sequence: int) -> bytes:
    """Return `text` as records of `kind` HEADER or TEXT. The first record has the given `sequence`."""
    data = text.encode()
    pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        seal(TEXT_PIECE.pack(kind, MORE if i < last else 0, len(piece), (sequence + i) & 0xFFFFFFFF, piece))
        for i, piece in enumerate(pieces)
    )


def header_text(header: Header) -> str:
    """Return the header as JSON, without its version, which is in the preamble."""
    return _json(
        {
            "recorder": header.recorder,
            "argv": list(header.argv),
            "versions": dict(header.versions),
            "gpu": header.gpu,
            "rank": header.rank,
            "world_size": header.world_size,
            "extra": dict(header.extra),
        }
    )


def header_from_text(text: str, version: tuple[int, int]) -> Header:
    """Parse the text of `header_text`. Unknown fields are ignored. Raises ValueError, KeyError or TypeError."""
    fields = json.loads(text)
    return Header(
        recorder=fields["recorder"],
        argv=tuple(fields["argv"]),
        versions=fields["versions"],
        gpu=fields["gpu"],
        rank=int(fields["rank"]),
        world_size=int(fields["world_size"]),
        extra=fields["extra"],
        version=version,
    )


def collective_text(
    *,
    kind: str,
    group: str,
    members: Sequence[int],
    size: int | None,
    shape: Sequence[int],
    dtype: str,
    phase: str | None,
    peer: int | None,
) -> str:
    """Return the description of a collective, which is equal for repeated calls. `size` defaults to the number of members."""
    return _json(
        {
            "kind": kind,
            "group": group,
            "members": list(members),
            "size": len(members) if size is None else size,
            "shape": list(shape),
            "dtype": dtype,
            "phase": phase,
            "peer": peer,
        }
    )


def label_text(*, role: str, name: str, shape: Sequence[int], dtype: str) -> str:
    """Return the description of a labelled tensor, without its address and size."""
    return _json({"role": role, "name": name, "shape": list(shape), "dtype": dtype})


def collective_event(sequence: int, time_ns: int, size_bytes: int, text: str) -> CollectiveEvent:
    """Return the event described by `text` (see `collective_text`). Raises ValueError, KeyError or TypeError."""
    fields = _fields(text)
    return CollectiveEvent(
        sequence=sequence,
        time_ns=time_ns,
        kind=fields["kind"],
        group=fields["group"],
        members=tuple(fields["members"]),
        size=fields["size"],
        shape=tuple(fields["shape"]),
        dtype=fields["dtype"],
        bytes=size_bytes,
        phase=fields["phase"],
        peer=fields["peer"],
    )


def label_event(sequence: int, time_ns: int, pointer: int, size_bytes: int, text: str) -> Label:
    """Return the event described by `text` (see `label_text`). Raises ValueError, KeyError or TypeError."""
    fields = _fields(text)
    return Label(sequence, time_ns, pointer, fields["role"], fields["name"], tuple(fields["shape"]), fields["dtype"], size_bytes)


def kernel_text(call: KernelCall) -> str:
    """Return the description of a kernel, which is equal for equal calls."""
    return _json({"kind": _KERNEL_KINDS[type(call)], **call._asdict()})


@functools.lru_cache(maxsize=4096)
def kernel_call(text: str) -> KernelCall:
    """Return the call described by `text` (see `kernel_text`). Raises ValueError, KeyError or TypeError."""
    fields = _fields(text)
    kind = {name: kind for kind, name in _KERNEL_KINDS.items()}[fields["kind"]]
    values = {name: fields[name] for name in kind._fields}
    for name, value in values.items():
        if not _is_valid(name, value):
            raise ValueError(f"{name} of a kernel is {value!r}")
    return kind(**values)


def _is_valid(name: str, value: Any) -> bool:
    if name == "direction":
        return value in DIRECTIONS
    if name == "name":
        return isinstance(value, str)
    return isinstance(value, int) and -1 <= value < 1 << 63


def kernel_event(sequence: int, time_ns: int, text: str) -> KernelEvent:
    """Return the event described by `text` (see `kernel_text`). Raises ValueError, KeyError or TypeError."""
    return KernelEvent(sequence, time_ns, kernel_call(text))


@functools.lru_cache(maxsize=4096)
def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    return fields


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
