"""Files that are built to use much memory or time. Each is refused at once with an error of one line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from allocator_hook.trace_writer import TraceWriter, compress
from analyzer.trace import format as fmt
from analyzer.trace.events import GemmCall, Header, TraceError
from analyzer.trace.reader import read_trace


def write_trace(path: Path, events: int = 3) -> None:
    with TraceWriter(path, Header(recorder="shadow")) as writer:
        for _ in range(events):
            writer.free(512, time_ns=0)


def test_zeros_behind_a_trace_are_refused_if_there_are_many(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write_trace(path)
    os.truncate(path, path.stat().st_size - fmt.RECORD_BYTES)
    os.truncate(path, 1 << 20)
    assert read_trace(path).truncated, "a file system can leave a few zeros"
    os.truncate(path, 2 << 30)
    with pytest.raises(TraceError, match="a damaged record"):
        read_trace(path)


def test_the_most_regular_trace_is_not_a_bomb(tmp_path: Path) -> None:
    """Equal events differ in their sequence and checksum, which do not compress."""
    write_trace(tmp_path / "trace", events=20000)
    compress(tmp_path / "trace", tmp_path / "packed")
    assert len(read_trace(tmp_path / "packed")) == 20000
    assert (tmp_path / "trace").stat().st_size / len(gzip.compress((tmp_path / "trace").read_bytes(), 9)) < 12


@pytest.mark.parametrize(
    ("text", "fault"),
    [("[" * 100_000, "cannot be decoded"), pytest.param(json.dumps("x" * (17 << 20)), "more than 16 MiB", marks=pytest.mark.slow)],
)
def test_a_nested_or_very_long_text_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(fmt.preamble() + fmt.text_records(fmt.HEADER, text, 0))
    with pytest.raises(TraceError, match=fault):
        read_trace(path)


@pytest.mark.parametrize("size", [10**400, -5, 1.5, "9", [1], None])
def test_a_kernel_with_an_impossible_size_is_refused(tmp_path: Path, size: object) -> None:
    path = tmp_path / "trace"
    with TraceWriter(path, Header(recorder="shadow")) as writer:
        writer.kernel(GemmCall(size, 2, 2, 1, 16, False))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="m of a kernel is"):
        list(read_trace(path))
