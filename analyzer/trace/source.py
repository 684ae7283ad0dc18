"""Loads the bytes of a trace file: memory-mapped, or decompressed if the file is compressed."""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path
from typing import Final

from analyzer.trace.events import TraceError
from analyzer.trace.format import GZIP_MAGIC

_PART_BYTES: Final = 1 << 16
_MAX_RATIO: Final = 100
"""Decompressed bytes per compressed byte. A record of 48 bytes has a checksum of 4 bytes, so a trace stays below 12."""
_GZIP: Final = 16 + zlib.MAX_WBITS


def load(path: Path) -> tuple[memoryview, bool]:
    """Return the bytes of the trace at `path`, and whether its compressed file is incomplete. Raises TraceError, OSError."""
    with path.open("rb") as file:
        if file.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
            return _decompress(path)
        size = file.seek(0, 2)
        if size == 0:  # an empty file cannot be mapped
            return memoryview(b""), False
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)), False


def _decompress(path: Path) -> tuple[memoryview, bool]:
    data = bytearray()
    read = 0
    stream = zlib.decompressobj(wbits=_GZIP)
    with path.open("rb") as file:
        try:
            while not stream.eof and (part := file.read(_PART_BYTES)):
                read += len(part)
                data += stream.decompress(part, read * _MAX_RATIO + 1)
                if stream.unconsumed_tail or len(data) > read * _MAX_RATIO:
                    fault = f"the compressed file grows to more than {_MAX_RATIO} times its size, which no trace does"
                    raise TraceError(path, len(data), fault, "give a file that --info-record wrote")
        except zlib.error as error:
            fault = f"the compressed file is damaged at or after this offset ({error})"
            raise TraceError(path, len(data), fault, "copy it again, or record it again") from error
        if stream.unused_data or file.read(1):
            raise TraceError(path, len(data), "data after the end of the compressed file", "copy it again")
    return memoryview(data), not stream.eof
