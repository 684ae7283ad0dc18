"""The trace format: writing and reading, truncated traces, and detection of damage."""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator_hook.trace_writer import TraceWriter, compress
from analyzer.errors import AnalyzerError
from analyzer.trace.events import AttentionCall, GemmCall
from analyzer.trace.integrity import check
from analyzer.trace.reader import (
    PHASES,
    Allocation,
    CollectiveEvent,
    Event,
    Free,
    Header,
    KernelEvent,
    Label,
    Mark,
    Trace,
    TraceError,
    read_trace,
)
from tests.examples import examples

RECORD = 48
HEADER = Header(
    recorder="shadow",
    argv=("torchrun", "pretrain_gpt.py", "--num-layers", "2", "--säure", "漢字"),
    versions={"torch": "2.13.0", "megatron-core": "0.16.1"},
    gpu="NVIDIA H100 80GB HBM3",
    rank=3,
    world_size=16,
    extra={"note": [1, None, "x"]},
)
GEMM = GemmCall(m=512, n=1536, k=256, products=4, bits=16, accumulates=True)
ATTENTION = AttentionCall("backward", 2, 8, 512, 1024, 64, 32, causal=True, window=-1)
LONG_NAME = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def write_small(path: Path) -> bytes:
    """Write a trace with an event of every kind and return its bytes."""
    with TraceWriter(path, HEADER) as writer:
        writer.enter("", "build", time_ns=1)
        writer.allocation(0x7F0000000000, 4096, 1, 0xABC, time_ns=2)
        writer.label(0x7F0000000010, "parameter", LONG_NAME, shape=(4, 8), dtype="bf16", bytes=64, time_ns=3)
        writer.leave("", "build", time_ns=4)
        writer.collective(
            "all_reduce", group="tp", members=(0, 1), shape=(2, 3), dtype="bf16", bytes=12, phase="forward", time_ns=5
        )
        writer.collective("send", group="pp", size=4, shape=(7,), dtype="fp32", bytes=28, peer=9, time_ns=6)
        writer.enter(LONG_NAME, "recompute", 5, 1, time_ns=7)
        writer.allocation(0, 2**63, failed=True, time_ns=8)
        writer.free(0x7F0000000000, 1, 0xABC, time_ns=9)
        writer.kernel(GEMM, time_ns=10)
        writer.kernel(ATTENTION, time_ns=11)
    return path.read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("trace") / "small")


def header_end(data: bytes) -> int:
    """Return the offset of the first record that is not a header record (kind 1)."""
    return next(at for at in range(RECORD, len(data), RECORD) if data[at] != 1)


def parse(data: bytes) -> Trace:
    """Parse the bytes of a trace without a file."""
    path = Path("bytes")
    return Trace(path, *check(path, memoryview(data), cut_short=False))


def read(path: Path, data: bytes) -> list[Event]:
    path.unlink(missing_ok=True)  # creating a file is faster than truncating one
    path.write_bytes(data)
    return list(read_trace(path))


def without_sequence(event: Event) -> tuple[object, ...]:
    return (type(event), *(getattr(event, name) for name in event.__slots__ if name != "sequence"))


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_small(tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert trace.header == HEADER
    assert (trace.truncated, trace.skipped, len(trace)) == (False, 0, 11)
    events = list(trace)
    sequences = [event.sequence for event in events]
    assert sequences == sorted(set(sequences))
    assert [without_sequence(event) for event in events] == [
        without_sequence(event)
        for event in (
            Mark(0, 1, "enter", "", "build", -1, -1),
            Allocation(0, 2, 0x7F0000000000, 4096, 1, 0xABC, False),
            Label(0, 3, 0x7F0000000010, "parameter", LONG_NAME, (4, 8), "bf16", 64),
            Mark(0, 4, "leave", "", "build", -1, -1),
            CollectiveEvent(0, 5, "all_reduce", "tp", (0, 1), 2, (2, 3), "bf16", 12, "forward", None),
            CollectiveEvent(0, 6, "send", "pp", (), 4, (7,), "fp32", 28, None, 9),
            Mark(0, 7, "enter", LONG_NAME, "recompute", 5, 1),
            Allocation(0, 8, 0, 2**63, 0, 0, True),
            Free(0, 9, 0x7F0000000000, 1, 0xABC),
            KernelEvent(0, 10, GEMM),
            KernelEvent(0, 11, ATTENTION),
        )
    ]


def test_the_bytes_follow_the_format_description(small: bytes) -> None:
    # decoded here as FORMAT.md describes: preamble, JSON header, then the fields of each record at their offsets
    assert small[:8] == b"\x89MEMTRC\n"
    assert struct.unpack_from("<HHI", small, 8) == (1, 2, 48)
    records = [small[at : at + RECORD] for at in range(RECORD, len(small), RECORD)]
    header = b"".join(r[8 : 8 + struct.unpack_from("<h", r, 2)[0]] for r in records if r[0] == 1)
    assert json.loads(header)["argv"][-1] == "漢字"
    assert [struct.unpack_from("<I", r, 4)[0] for r in records] == list(range(len(records)))
    allocation = next(r for r in records if r[0] == 3)
    assert struct.unpack_from("<h", allocation, 2) == (1,)
    assert struct.unpack_from("<QQQQ", allocation, 8) == (2, 0x7F0000000000, 4096, 0xABC)
    assert records[-1][0] == 10
    for end in range(RECORD, len(small) + 1, RECORD):  # each checksum covers all preceding bytes
        assert zlib.crc32(small[: end - 4]) == struct.unpack_from("<I", small, end - 4)[0]


def test_every_prefix_is_read_as_a_truncated_trace(small: bytes) -> None:
    complete = list(parse(small))
    body = header_end(small)
    for length in range(body, len(small)):
        trace = parse(small[:length])
        events = list(trace)
        assert trace.truncated
        assert len(trace) == len(events)
        assert events == complete[: len(events)]
        assert sum(small[at] in (*range(3, 10), 11) for at in range(RECORD, length - RECORD + 1, RECORD)) == len(events)
    for length in range(body):
        with pytest.raises(TraceError, match="ends inside its header"):
            parse(small[:length])


@pytest.mark.parametrize("missing", [1, 47, 48, 49])
def test_a_file_that_ends_early_is_truncated(tmp_path: Path, small: bytes, missing: int) -> None:
    assert read(tmp_path / "cut", small[:-missing]) == list(parse(small))[: 11 if missing < 49 else 10]
    assert read_trace(tmp_path / "cut").truncated


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="ends inside its header"):
        read(tmp_path / "empty", b"")


def test_a_trace_that_ends_in_zeros_is_truncated(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "zeros"
    complete = read(path, small)
    events = read(path, small[:-RECORD] + bytes(1000))
    assert events == complete
    assert read_trace(path).truncated


def test_every_changed_byte_is_an_error_with_its_offset(small: bytes) -> None:
    for at in range(len(small)):
        for mask in (1, 0x80, 0xFF):
            with pytest.raises(TraceError) as caught:
                parse(small[:at] + bytes([small[at] ^ mask]) + small[at + 1 :])
            assert caught.value.offset <= at < caught.value.offset + RECORD
            assert f"byte {caught.value.offset}: " in str(caught.value)


def test_lost_moved_and_duplicated_records_are_errors(small: bytes) -> None:
    at = header_end(small) + RECORD
    one, two = small[at : at + RECORD], small[at + RECORD : at + 2 * RECORD]
    for damaged in (
        small[:at] + small[at + RECORD :],
        small[:at] + two + one + small[at + 2 * RECORD :],
        small[:at] + one + one + small[at + RECORD :],
        small + small[at : at + RECORD],
        small + b"x",
    ):
        with pytest.raises(TraceError):
            parse(damaged)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("allocation"), st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(-1, 99), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 2**64 - 1), st.integers(0, 99)),
        st.tuples(st.sampled_from(("enter", "leave")), st.text(max_size=90), st.sampled_from(PHASES), st.integers(-1, 2**40)),
        st.tuples(st.just("collective"), st.lists(st.integers(0, 2**31), max_size=9), st.text(max_size=5), st.integers(0, 2**63)),
    ),
    max_size=30,
)


def write_events(path: Path, events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Write `events` and return the values that reading must give."""
    expected: list[tuple[Any, ...]] = []
    with TraceWriter(path, Header(recorder="cuda")) as writer:
        for event in events:
            match event:
                case ("allocation", pointer, size, device, failed):
                    writer.allocation(pointer, size, device, failed=failed)
                    expected.append((0 if failed else pointer, size, device, failed))
                case ("free", pointer, stream):
                    writer.free(pointer, 0, stream)
                    expected.append((pointer, stream))
                case ("enter" | "leave" as way, name, phase, number):
                    getattr(writer, way)(name, phase, number, -1)
                    expected.append((way, name, phase, number, -1))
                case ("collective", members, group, size):
                    writer.collective("all_gather", group=group, members=members, shape=members, dtype="bf16", bytes=size)
                    expected.append((group, tuple(members), len(members), tuple(members), size))
    return expected


def values(event: Event) -> tuple[object, ...]:
    match event:
        case Allocation():
            return event.pointer, event.bytes, event.device, event.failed
        case Free():
            return event.pointer, event.stream
        case Mark():
            return event.kind, event.name, event.phase, event.microbatch, event.iteration
        case CollectiveEvent():
            return event.group, event.members, event.size, event.shape, event.bytes
    raise AssertionError(event)


@settings(max_examples=examples(60))
@given(events=EVENTS, cut=st.floats(0, 1), flip=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_random_traces_are_read_and_damage_is_detected(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]], cut: float, flip: float, mask: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    expected = write_events(path, events)
    data = path.read_bytes()
    assert [values(event) for event in read_trace(path)] == expected

    body = header_end(data)
    prefix = list(parse(data[: body + int(cut * (len(data) - body))]))
    assert [values(event) for event in prefix] == expected[: len(prefix)]

    at = int(flip * len(data))
    with pytest.raises(TraceError):
        parse(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])


def sealed(kind: int, sequence: int, rest: bytes = bytes(36)) -> bytes:
    """Return a record as a writer of a later version might write it."""
    record = struct.pack("<BBhI", kind, 0, 0, sequence) + rest
    return record + struct.pack("<I", zlib.crc32(record, 0x2144DF1C))


def test_unknown_kinds_are_skipped_and_counted(tmp_path: Path, small: bytes) -> None:
    last = len(small) // RECORD - 2
    newer = small[:-RECORD] + sealed(77, last) + sealed(200, last + 1) + sealed(10, last + 2)
    assert read(tmp_path / "newer", newer) == read(tmp_path / "known", small)
    trace = read_trace(tmp_path / "newer")
    assert (trace.skipped, trace.truncated) == (2, False)


@pytest.mark.parametrize(("version", "unsupported"), [((1, 9), False), ((2, 0), True), ((0, 9), True)])
def test_another_major_version_is_an_error(tmp_path: Path, small: bytes, version: tuple[int, int], unsupported: bool) -> None:
    start = small[:8] + struct.pack("<HH", *version) + small[12:44]
    (tmp_path / "other").write_bytes(start + struct.pack("<I", zlib.crc32(start)) + small[RECORD:])
    if unsupported:
        with pytest.raises(TraceError, match=f"format is {version[0]}.{version[1]}"):
            read_trace(tmp_path / "other")
    else:
        assert read_trace(tmp_path / "other").header.version == version


def test_other_files_are_reported_as_not_a_trace(tmp_path: Path) -> None:
    for text in (b"{}", b"\x80\x04K\x01.", bytes(500)):
        (tmp_path / "other").write_bytes(text)
        with pytest.raises(AnalyzerError, match="not a trace"):
            read_trace(tmp_path / "other")
    with pytest.raises(OSError, match="No such file"):
        read_trace(tmp_path / "absent")


def test_a_record_with_invalid_contents_is_an_error_with_its_offset(tmp_path: Path, small: bytes) -> None:
    last = len(small) // RECORD - 2
    no_such_text = struct.pack("<QQQQI", 0, 0, 0, 0, 10**6)
    (tmp_path / "odd").write_bytes(small[:-RECORD] + sealed(6, last, no_such_text))
    trace = read_trace(tmp_path / "odd")
    with pytest.raises(TraceError, match=f"byte {len(small) - RECORD}: "):
        list(trace)


def test_columns_have_the_fields_of_the_records(tmp_path: Path) -> None:
    write_small(tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    columns = trace.columns
    for event in trace:
        at = event.sequence
        assert columns.time_ns[at] == event.time_ns
        if isinstance(event, Allocation):
            assert columns.kind[at] == (4 if event.failed else 3)
            assert (columns.pointer[at], columns.bytes[at]) == (event.pointer, event.bytes)
            assert (columns.device[at], columns.stream[at]) == (event.device, event.stream)
        elif isinstance(event, Mark):
            assert trace.texts[columns.text[at]] == event.name
            assert PHASES[columns.flags[at]] == event.phase
    assert len(set(map(len, (columns.kind, columns.flags, columns.device, columns.time_ns, columns.text)))) == 1


def test_compressed_traces_are_read(tmp_path: Path, small: bytes) -> None:
    plain = read(tmp_path / "plain", small)
    compress(tmp_path / "plain", tmp_path / "any-name")
    assert list(read_trace(tmp_path / "any-name")) == plain
    with TraceWriter(tmp_path / "t.bin.gz", HEADER) as writer:
        writer.free(7)
        assert (tmp_path / "t.bin").exists()
    assert [path.name for path in tmp_path.glob("t.bin*")] == ["t.bin.gz"]
    assert [type(event) for event in read_trace(tmp_path / "t.bin.gz")] == [Free]


def test_damaged_compressed_traces_never_give_wrong_events(tmp_path: Path, small: bytes) -> None:
    packed = gzip.compress(small, mtime=0)
    path = tmp_path / "t.gz"
    complete = read(path, packed)
    for length in range(len(packed)):
        try:
            events = read(path, packed[:length])
        except TraceError:
            continue
        assert read_trace(path).truncated
        assert events == complete[: len(events)]
    for at in range(len(packed)):
        try:
            events = read(path, packed[:at] + bytes([packed[at] ^ 4]) + packed[at + 1 :])
        except TraceError:
            continue
        assert events == complete or read_trace(path).truncated  # some bytes of the gzip header have no effect


def test_a_file_appears_after_its_header_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        TraceWriter(tmp_path / "absent" / "trace", HEADER)
    writer = TraceWriter(tmp_path / "trace", HEADER)
    assert read_trace(tmp_path / "trace").header == HEADER
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    writer.close()
    writer.close()


def test_a_name_is_stored_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", HEADER) as writer:
        for microbatch in range(100):
            writer.enter(LONG_NAME, "forward", microbatch, 0)
            writer.leave(LONG_NAME, "forward", microbatch, 0)
    assert (tmp_path / "trace").read_bytes().count(LONG_NAME[:30].encode()) == 1
    assert {event.name for event in read_trace(tmp_path / "trace") if isinstance(event, Mark)} == {LONG_NAME}


def test_the_writer_fills_in_time_and_order(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    with TraceWriter(tmp_path / "trace", HEADER) as writer:
        for pointer in range(1, 5000):
            writer.allocation(pointer, 1)
    events = list(read_trace(tmp_path / "trace"))
    times = [event.time_ns for event in events]
    assert [event.pointer for event in events if isinstance(event, Allocation)] == list(range(1, 5000))
    assert before <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic_ns()
