"""Checks a trace: its preamble, the checksum and sequence of every record, and its end. Also collects its texts."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from analyzer.trace import format as fmt
from analyzer.trace.events import FORMAT_VERSION, Header, TraceError

_CHUNK_RECORDS: Final = 65536
_MAX_ZEROS: Final = 1 << 26
"""Bytes of zeros behind the last record. File systems allocate at most a few MB ahead of a write."""
_MAX_TEXT_PIECES: Final = (1 << 24) // fmt.PIECE_BYTES
"""Records of one text of at most 16 MiB. The longest are lists of the ranks of a group."""
_COPY_OR_RECORD: Final = "copy it again, or record it again"
_FIX_WRITER: Final = "fix the program that wrote it"


@dataclass(frozen=True, slots=True)
class Contents:
    """The valid records of a trace, and their properties."""

    records: memoryview
    """The complete records from sequence 0, without the preamble."""
    texts: tuple[str, ...]
    events: int
    skipped: int
    """Number of records of unknown kinds."""
    truncated: bool


def check(path: Path, data: memoryview, *, cut_short: bool) -> tuple[Header, Contents]:
    """Return the header and the contents of `data`. `path` is used in messages. `cut_short`: the data are known to be incomplete.

    Raises TraceError with the offset of the first fault.
    """
    version = _version(path, data)
    records, complete = _valid_records(path, data)
    header, texts = _texts(path, records, version)
    kinds = bytes(records[:: fmt.RECORD_BYTES])
    ended = _ended(path, kinds, complete=complete)
    events = sum(kinds.count(kind) for kind in fmt.EVENT_KINDS)
    text_records = kinds.count(fmt.TEXT) + kinds.count(fmt.HEADER)
    return header, Contents(
        records=records,
        texts=texts,
        events=events,
        skipped=len(kinds) - events - text_records - ended,
        truncated=cut_short or not ended,
    )


def _version(path: Path, data: memoryview) -> tuple[int, int]:
    """Return the version in the preamble. Raises TraceError if it is not supported."""
    start = bytes(data[: fmt.RECORD_BYTES])
    if not start.startswith(fmt.MAGIC[: len(start)]):
        raise TraceError(path, 0, "not a trace of the allocator hook", "give a file that --info-record wrote")
    if len(start) < fmt.RECORD_BYTES:
        raise _ends_in_header(path, data)
    if zlib.crc32(start) != fmt.RESIDUE:
        raise TraceError(path, 0, "the first 48 bytes are damaged", _COPY_OR_RECORD)
    _, major, minor, record_bytes = fmt.PREAMBLE.unpack_from(start)
    if major != FORMAT_VERSION[0] or record_bytes != fmt.RECORD_BYTES:
        fault = f"its format is {major}.{minor}, but this program reads {FORMAT_VERSION[0]}.x"
        raise TraceError(path, len(fmt.MAGIC), fault, "read it with the version of this program that wrote it, or a newer one")
    return major, minor


def _valid_records(path: Path, data: memoryview) -> tuple[memoryview, bool]:
    """Return the records up to the end or to a tail of zeros, and whether nothing follows them.

    Raises TraceError at a damaged record.
    """
    size = fmt.RECORD_BYTES
    end = len(data) - len(data) % size
    step = _CHUNK_RECORDS * size
    for offset in range(size, end, step):
        chunk = data[offset : min(offset + step, end)]
        first = offset // size - 1
        if zlib.crc32(chunk, fmt.RESIDUE) == fmt.RESIDUE and _numbered(chunk, first):
            continue
        bad = next(i for i in range(len(chunk) // size) if not _valid(chunk[i * size : (i + 1) * size], first + i))
        fault_at = offset + bad * size
        tail = data[fault_at:]
        if len(tail) > _MAX_ZEROS or bytes(tail).count(0) < len(tail):
            raise TraceError(path, fault_at, "a damaged record", _COPY_OR_RECORD)
        return data[size:fault_at], False  # after a crash file systems may leave zeros behind the last write
    return data[size:end], end == len(data)


def _numbered(chunk: memoryview, first: int) -> bool:
    """Return whether the records of `chunk` have consecutive sequences from `first` on, modulo 2^32."""
    count = len(chunk) // fmt.RECORD_BYTES
    numbers = chunk.cast("I")[1 :: fmt.RECORD_BYTES // 4].tolist()
    return numbers == [n & 0xFFFFFFFF for n in range(first, first + count)]


def _valid(record: memoryview, sequence: int) -> bool:
    return zlib.crc32(record, fmt.RESIDUE) == fmt.RESIDUE and _numbered(record, sequence)


def _texts(path: Path, records: memoryview, version: tuple[int, int]) -> tuple[Header, tuple[str, ...]]:
    """Return the header, which comes first, and all texts in the order of their numbers."""
    header: Header | None = None
    texts: list[str] = []
    pieces: list[bytes] = []
    expected = 0
    for sequence in _text_sequences(records):
        kind, flags, used, _, piece = fmt.TEXT_PIECE.unpack_from(records, sequence * fmt.RECORD_BYTES)
        if (pieces and sequence != expected) or (kind == fmt.HEADER) != (header is None):
            raise TraceError(path, (1 + sequence) * fmt.RECORD_BYTES, "a misplaced text record", _FIX_WRITER)
        pieces.append(piece[:used])
        if len(pieces) > _MAX_TEXT_PIECES:
            raise TraceError(path, (1 + sequence) * fmt.RECORD_BYTES, "a text of more than 16 MiB", _FIX_WRITER)
        expected = sequence + 1
        if flags & fmt.MORE:
            continue
        try:
            text = b"".join(pieces).decode()
            if kind == fmt.HEADER:
                header = fmt.header_from_text(text, version)
            else:
                texts.append(text)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            offset = (2 + sequence - len(pieces)) * fmt.RECORD_BYTES
            raise TraceError(path, offset, f"a text that cannot be decoded ({error!r})", _FIX_WRITER) from error
        pieces = []
    if header is None:
        raise _ends_in_header(path, records)
    return header, tuple(texts)


def _text_sequences(records: memoryview) -> list[int]:
    kinds = bytes(records[:: fmt.RECORD_BYTES])
    sequences: list[int] = []
    for kind in (fmt.HEADER, fmt.TEXT):
        at = kinds.find(kind)
        while at >= 0:
            sequences.append(at)
            at = kinds.find(kind, at + 1)
    return sorted(sequences)


def _ended(path: Path, kinds: bytes, *, complete: bool) -> bool:
    """Return whether there is an end record. Raises TraceError if anything follows it."""
    at = kinds.find(fmt.END)
    if at < 0:
        return False
    if at + 1 < len(kinds) or not complete:
        raise TraceError(path, (2 + at) * fmt.RECORD_BYTES, "data after the end record", _COPY_OR_RECORD)
    return True


def _ends_in_header(path: Path, data: memoryview) -> TraceError:
    return TraceError(path, len(data), "the file ends inside its header, so it has no events")
