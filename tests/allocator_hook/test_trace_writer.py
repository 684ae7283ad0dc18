"""The trace writer, if a garbage collection frees tensors while it writes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from allocator_hook import trace_writer
from allocator_hook.trace_writer import TraceWriter
from analyzer.trace.events import Allocation, Free, Header, Mark
from analyzer.trace.format import text_records
from analyzer.trace.reader import read_trace


def test_a_free_during_a_record_is_written_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weak reference's callback runs in any allocation of a Python object, also while the writer holds its lock."""
    path = tmp_path / "trace"
    writer = TraceWriter(path, Header(recorder="shadow"))
    writer.allocation(512, 1024)

    def collecting(kind: int, text: str, sequence: int) -> bytes:
        writer.free(512)
        return text_records(kind, text, sequence)

    monkeypatch.setattr(trace_writer, "text_records", collecting)
    thread = threading.Thread(target=writer.enter, args=("decoder", "forward"), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive(), "the writer waits for its own lock"
    writer.close()
    assert [type(event) for event in read_trace(path)] == [Allocation, Free, Mark]
