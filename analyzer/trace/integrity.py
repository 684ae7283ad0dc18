"""Checks a whole trace: its preamble, the checksum and number of every record, and where it ends. Finds its texts on the way."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from analyzer.trace import format as fmt
from analyzer.trace.events import FORMAT_VERSION, Header, TraceError

_CHUNK_RECORDS: Final = 65536
_AGAIN: Final = "copy it again, or record it again"


@dataclass(frozen=True, slots=True)
class Contents:
    """The sound records of a trace and what is known of them."""

    records: memoryview
    """Whole records, the first that of sequence 0, without the preamble."""
    texts: tuple[str, ...]
    events: int
    skipped: int
    """Records of unknown kinds."""
    truncated: bool


def check(path: Path, data: memoryview, *, cut_short: bool) -> tuple[Header, Contents]:
    """Header and contents of `data`. `path` is for messages; `cut_short` where it is known that something is missing.

    Raises TraceError with the offset of the first fault.
    """
    version = _version(path, data)
    records, whole = _sound_records(path, data)
    header, texts = _texts(path, records, version)
    kinds = bytes(records[:: fmt.RECORD_BYTES])
    ended = _ended(path, kinds, whole=whole)
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
    """The version in the preamble. Raises TraceError unless this program can read it."""
    start = bytes(data[: fmt.RECORD_BYTES])
    if not start.startswith(fmt.MAGIC[: len(start)]):
        raise TraceError(path, 0, "this is no trace of the allocator hook", "name a file that --info-record wrote")
    if len(start) < fmt.RECORD_BYTES:
        raise _ends_in_header(path, data)
    if zlib.crc32(start) != fmt.RESIDUE:
        raise TraceError(path, 0, "its first 48 bytes are damaged", _AGAIN)
    _, major, minor, record_bytes = fmt.PREAMBLE.unpack_from(start)
    if major != FORMAT_VERSION[0] or record_bytes != fmt.RECORD_BYTES:
        fault = f"its format is {major}.{minor} and this program reads {FORMAT_VERSION[0]}.x"
        raise TraceError(path, len(fmt.MAGIC), fault, "read it with the version of this program that wrote it, or a newer one")
    return major, minor


def _sound_records(path: Path, data: memoryview) -> tuple[memoryview, bool]:
    """The records up to the end or a tail of zeros, and whether nothing follows them. Raises TraceError at a damaged one."""
    size = fmt.RECORD_BYTES
    end = len(data) - len(data) % size
    step = _CHUNK_RECORDS * size
    for offset in range(size, end, step):
        chunk = data[offset : min(offset + step, end)]
        first = offset // size - 1
        if zlib.crc32(chunk, fmt.RESIDUE) == fmt.RESIDUE and _numbered(chunk, first):
            continue
        bad = next(i for i in range(len(chunk) // size) if not _sound(chunk[i * size : (i + 1) * size], first + i))
        fault_at = offset + bad * size
        if any(data[fault_at:]):
            raise TraceError(path, fault_at, "a damaged record", _AGAIN)
        return data[size:fault_at], False  # file systems leave zeros after the last write before a crash
    return data[size:end], end == len(data)


def _numbered(chunk: memoryview, first: int) -> bool:
    """Whether the records of `chunk` are numbered from `first` on, in 32 bits."""
    count = len(chunk) // fmt.RECORD_BYTES
    numbers = chunk.cast("I")[1 :: fmt.RECORD_BYTES // 4].tolist()
    return numbers == [n & 0xFFFFFFFF for n in range(first, first + count)]


def _sound(record: memoryview, sequence: int) -> bool:
    return zlib.crc32(record, fmt.RESIDUE) == fmt.RESIDUE and _numbered(record, sequence)


def _texts(path: Path, records: memoryview, version: tuple[int, int]) -> tuple[Header, tuple[str, ...]]:
    """The header, which comes first, and all texts in the order of their numbers."""
    header: Header | None = None
    texts: list[str] = []
    pieces: list[bytes] = []
    expected = 0
    for sequence in _text_sequences(records):
        kind, flags, used, _, piece = fmt.TEXT_PIECE.unpack_from(records, sequence * fmt.RECORD_BYTES)
        if (pieces and sequence != expected) or (kind == fmt.HEADER) != (header is None):
            raise TraceError(path, (1 + sequence) * fmt.RECORD_BYTES, "a piece of text out of place", "mend its writer")
        pieces.append(piece[:used])
        expected = sequence + 1
        if flags & fmt.MORE:
            continue
        try:
            text = b"".join(pieces).decode()
            if kind == fmt.HEADER:
                header = fmt.header_from_text(text, version)
            else:
                texts.append(text)
        except (ValueError, KeyError, TypeError) as error:
            offset = (2 + sequence - len(pieces)) * fmt.RECORD_BYTES
            raise TraceError(path, offset, f"a text that cannot be read ({error!r})", "mend its writer") from error
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


def _ended(path: Path, kinds: bytes, *, whole: bool) -> bool:
    """Whether there is an end record. Raises TraceError where something comes after it."""
    at = kinds.find(fmt.END)
    if at < 0:
        return False
    if at + 1 < len(kinds) or not whole:
        raise TraceError(path, (2 + at) * fmt.RECORD_BYTES, "data after the end record", _AGAIN)
    return True


def _ends_in_header(path: Path, data: memoryview) -> TraceError:
    return TraceError(path, len(data), "it ends inside its header, so nothing was recorded")
