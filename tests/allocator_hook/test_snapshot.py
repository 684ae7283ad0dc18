"""Conversion of PyTorch snapshots to traces, without executing their contents, and of traces to PyTorch's memory visualizer."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from allocator_hook import snapshot as snapshot_module
from allocator_hook import visualizer as visualizer_module
from allocator_hook.snapshot import convert_snapshot
from allocator_hook.trace_writer import TraceWriter
from allocator_hook.visualizer import write_visualizer
from analyzer.trace.reader import Allocation, Event, Free, Header, TraceError, read_trace

MIB = 2**20


def entry(action: str, addr: int, size: int, time_us: int, stream: int = 0) -> dict[str, Any]:
    """Return a TraceEntry of torch.cuda.memory._snapshot (PyTorch 2.13)."""
    frames = [{"filename": "model.py", "line": 7, "name": "forward"}]
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": time_us, "frames": frames}


def block(size: int, requested: int, state: str) -> dict[str, Any]:
    return {"size": size, "requested_size": requested, "state": state, "frames": []}


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
    }


SNAPSHOT: Final[dict[str, Any]] = {
    "segments": [
        segment(
            0x1000_0000,
            [
                block(1024, 1000, "active_allocated"),  # allocated before the history
                block(512, 500, "active_allocated"),  # allocated in the history
                block(2 * MIB, 2 * MIB - 5, "active_awaiting_free"),  # no longer used by a tensor
                block(4096, 4000, "inactive"),
            ],
        ),
        segment(0x1000_0000, [block(MIB, 333, "active_allocated")], device=1),
    ],
    "device_traces": [
        [
            entry("segment_alloc", 0x1000_0000, 4 * MIB, 10),
            entry("free_requested", 0x1000_0600, 2 * MIB - 5, 11),  # allocated before the history
            entry("alloc", 0x1000_0400, 500, 12, stream=94),
            entry("free_requested", 0x1000_0400, 500, 14, stream=94),
            entry("free_completed", 0x1000_0400, 500, 15, stream=94),
            entry("oom", 0, 80 * 2**30, 17),
            entry("alloc", 0x1000_0400, 500, 18),
            entry("snapshot", 0, 0, 19),
        ],
        [entry("alloc", 0x1000_0000, 333, 13), entry("user_defined", 0, 0, 16)],
    ],
    "allocator_settings": {"max_split_size": -1},
    "external_annotations": [],
}


def convert(tmp_path: Path, content: object) -> list[Event]:
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(content))
    convert_snapshot(tmp_path / "snapshot.pickle", tmp_path / "trace")
    return list(read_trace(tmp_path / "trace"))


def summary(event: Event) -> tuple[object, ...]:
    if isinstance(event, Allocation):
        return "failed" if event.failed else "alloc", event.device, event.pointer, event.bytes, event.time_ns
    assert isinstance(event, Free)
    return "free", event.device, event.pointer, event.time_ns


def test_a_snapshot_is_converted_to_a_trace(tmp_path: Path) -> None:
    assert [summary(event) for event in convert(tmp_path, SNAPSHOT)] == [
        ("alloc", 0, 0x1000_0600, 2 * MIB - 5, 11_000),
        ("alloc", 0, 0x1000_0000, 1000, 11_000),
        ("free", 0, 0x1000_0600, 11_000),
        ("alloc", 0, 0x1000_0400, 500, 12_000),
        ("alloc", 1, 0x1000_0000, 333, 13_000),
        ("free", 0, 0x1000_0400, 14_000),
        ("failed", 0, 0, 80 * 2**30, 17_000),
        ("alloc", 0, 0x1000_0400, 500, 18_000),
    ]
    header = read_trace(tmp_path / "trace").header
    assert (header.recorder, header.extra) == ("snapshot", {"reserved_bytes": 1024 + 512 + 2 * MIB + 4096 + MIB})


def test_a_snapshot_without_a_history_gives_the_live_allocations(tmp_path: Path) -> None:
    events = convert(tmp_path, SNAPSHOT | {"device_traces": [[], []]})
    assert [summary(event)[:4] for event in events] == [
        ("alloc", 0, 0x1000_0000, 1000),
        ("alloc", 0, 0x1000_0400, 500),
        ("alloc", 1, 0x1000_0000, 333),
    ]


def test_a_snapshot_of_an_older_pytorch_without_times_is_converted(tmp_path: Path) -> None:
    old = [{name: value for name, value in one.items() if name != "time_us"} for one in SNAPSHOT["device_traces"][0]]
    events = convert(tmp_path, SNAPSHOT | {"device_traces": [old]})
    assert [type(event) for event in events].count(Free) == 2


class Hostile:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, Path])
def test_functions_in_a_pickle_are_not_called(tmp_path: Path, function: Callable[..., object]) -> None:
    victim = tmp_path / "victim"
    with pytest.raises(TraceError, match="contains only data"):
        convert(tmp_path, SNAPSHOT | {"segments": [Hostile(function, str(victim))]})
    assert not victim.exists()
    assert not (tmp_path / "trace").exists()


def test_pickle_opcodes_that_call_functions_are_rejected(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for payload in (
        f"cposix\nmkdir\n(S'{victim}'\ntR.",  # GLOBAL, REDUCE
        f"(S'{victim}'\niposix\nmkdir\n.",  # INST
        f"(cposix\nmkdir\nS'{victim}'\no.",  # OBJ
        "\x80\x02cbuiltins\nobject\n)\x81.",  # NEWOBJ
        "\x82\x01.",  # EXT1
        "Pid\n.",  # PERSID
    ):
        (tmp_path / "hostile").write_bytes(payload.encode("latin-1"))
        with pytest.raises(TraceError, match="not a PyTorch memory snapshot"):
            convert_snapshot(tmp_path / "hostile", tmp_path / "trace")
    assert not victim.exists()


def test_other_files_give_a_clear_error(tmp_path: Path) -> None:
    complete = pickle.dumps(SNAPSHOT)
    for content in (b"", b"\x89MEMTRC\n", b"{}", complete[: len(complete) // 2], pickle.dumps([1]), pickle.dumps({"segments": []})):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(TraceError, match="give a file from torch"):
            convert_snapshot(tmp_path / "other", tmp_path / "trace")
    damaged: tuple[dict[str, Any], ...] = (
        {"segments": 5, "device_traces": []},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 5}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "5"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1}]]},
        {"segments": [], "device_traces": [[[]]]},
        {"segments": [{"device": 0, "address": 1}], "device_traces": [[]]},
    )
    for wrong in damaged:
        with pytest.raises(TraceError, match="not a PyTorch memory snapshot"):
            convert(tmp_path, wrong)
    assert not (tmp_path / "trace").exists()


def labelled_trace(path: Path) -> None:
    with TraceWriter(path, Header(recorder="cuda")) as writer:
        writer.enter("", "build")
        writer.allocation(0x7000_0000_0000, 4096)
        writer.label(0x7000_0000_0010, "parameter", "weight", shape=(8,), dtype="bf16", bytes=16)
        writer.leave("", "build")
        writer.enter("", "forward", 3, 0)
        writer.enter("decoder.layers.0.mlp", "forward", 3, 0)
        writer.allocation(0x7000_0000_1000, 1000)
        writer.allocation(0x7000_0010_0000, 2000, stream=0x7FFF_1234)
        writer.leave("decoder.layers.0.mlp", "forward", 3, 0)
        writer.free(0x7000_0000_1000)
        writer.allocation(0x7000_0000_1000, 600)
        writer.allocation(0, 10**12, failed=True)
        writer.free(0x1234)
        writer.allocation(0x7000_0000_0000, 50, device=2)


# Opcodes that torch/utils/viz/MemoryViz.js of PyTorch 2.6 supports.
VISUALIZER_OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE",
    "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    labelled_trace(tmp_path / "trace")
    write_visualizer(read_trace(tmp_path / "trace"), tmp_path / "out.pickle")
    data = (tmp_path / "out.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VISUALIZER_OPCODES
    assert data[:2] == b"\x80\x04"
    return dict(pickle.loads(data))


def test_the_visualizer_file_has_every_event_with_its_modules(written: dict[str, Any]) -> None:
    first = written["device_traces"][0]
    assert [(e["action"], e["addr"], e["size"]) for e in first] == [
        ("alloc", 0x7000_0000_0000, 4096),
        ("alloc", 0x7000_0000_1000, 1000),
        ("alloc", 0x7000_0010_0000, 2000),
        ("free_requested", 0x7000_0000_1000, 1000),
        ("free_completed", 0x7000_0000_1000, 1000),
        ("alloc", 0x7000_0000_1000, 600),
        ("oom", 0, 10**12),
        ("snapshot", 0, 0),
    ]
    assert [f"{f['filename']}:{f['line']}:{f['name']}" for f in first[1]["frames"]] == [
        "forward:3:decoder.layers.0.mlp",
        "forward:3:forward",
    ]
    assert first[2]["stream"] == 0x7FFF_1234
    assert first[6]["device_free"] == 0
    assert [e["action"] for e in written["device_traces"][2]] == ["alloc"]
    assert written["device_traces"][1] == []


def test_labels_become_categories_including_unknown(written: dict[str, Any]) -> None:
    # annotate_snapshot of MemoryViz.js fails if no entry has the category 'unknown'
    entries = [e for trace in written["device_traces"] for e in trace]
    assert entries[0]["category"] == "parameter"
    assert {e["category"] for e in entries} == {"parameter", "unknown"}


def test_every_address_is_in_a_segment_that_is_filled_by_its_blocks(written: dict[str, Any]) -> None:
    # otherwise find_segment of MemoryViz.js returns null and the page fails; segsum of torch/cuda/_memory_viz.py sums the blocks
    for device, trace in enumerate(written["device_traces"]):
        segments = [s for s in written["segments"] if s["device"] == device]
        for e in trace:
            if e["action"] == "alloc":
                assert any(s["address"] <= e["addr"] and e["addr"] + e["size"] <= s["address"] + s["total_size"] for s in segments)
        for s in segments:
            assert sum(b["size"] for b in s["blocks"]) == s["total_size"]
            assert sum(b["size"] for b in s["blocks"] if b["state"] == "active_allocated") == s["allocated_size"]
    blocks = [(b["address"], b["size"], b["state"]) for s in written["segments"] for b in s["blocks"] if s["device"] == 0]
    assert blocks == [
        (0x7000_0000_0000, 4096, "active_allocated"),
        (0x7000_0000_1000, 600, "active_allocated"),
        (0x7000_0000_1000 + 600, 400, "inactive"),
        (0x7000_0010_0000, 2000, "active_allocated"),
    ]


def test_a_converted_visualizer_file_has_the_same_events(tmp_path: Path, written: dict[str, Any]) -> None:
    """A visualizer file that is converted back to a trace has the same allocations and frees."""
    assert written["segments"]
    convert_snapshot(tmp_path / "out.pickle", tmp_path / "back")

    def of(device: int, path: Path) -> list[tuple[object, ...]]:
        memory = [event for event in read_trace(path) if isinstance(event, Allocation | Free) and event.device == device]
        return [(type(e), e.pointer, e.bytes if isinstance(e, Allocation) else 0) for e in memory if e.pointer != 0x1234]

    for device in range(3):
        assert of(device, tmp_path / "back") == of(device, tmp_path / "trace")


@pytest.mark.shadow
def test_pytorchs_tools_read_the_visualizer_file(written: dict[str, Any]) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated: 6.6KiB" in viz.segsum(written)
    assert "raise OutOfMemoryError" in viz.trace(written)


def test_a_trace_without_labels_gives_no_categories(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", Header(recorder="cuda")) as writer:
        writer.allocation(512, 10)
        writer.allocation(512, 20)  # the free of the first allocation was not recorded
    write_visualizer(read_trace(tmp_path / "trace"), tmp_path / "out.pickle")
    (trace,) = pickle.loads((tmp_path / "out.pickle").read_bytes())["device_traces"]
    assert [(e["action"], e["size"]) for e in trace] == [
        ("alloc", 10), ("free_requested", 10), ("free_completed", 10), ("alloc", 20),
    ]  # fmt: skip
    assert not any("category" in e for e in trace)


def test_both_command_lines_convert_and_report_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(pickle.dumps(SNAPSHOT))
    arguments = [str(tmp_path / "in"), str(tmp_path / "trace")]
    assert snapshot_module.main(arguments) == 0
    assert visualizer_module.main([arguments[1], str(tmp_path / "out")]) == 0
    assert pickle.loads((tmp_path / "out").read_bytes())["segments"]
    for main in (snapshot_module.main, visualizer_module.main):
        assert main(["one"]) == 2
        assert main([str(tmp_path / "absent"), str(tmp_path / "x")]) == 2
        assert main([str(Path(__file__)), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 6


def test_the_visualizer_refuses_a_truncated_trace_unless_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "trace", tmp_path / "out"
    with TraceWriter(path, Header(recorder="cuda")) as writer:
        writer.allocation(512, 10)
    path.write_bytes(path.read_bytes()[:-1])
    assert visualizer_module.main([str(path), str(out)]) == 2
    assert not out.exists()
    assert capsys.readouterr().err.count("\n") == 1
    assert visualizer_module.main([str(path), str(out), "--info-allow-truncated"]) == 0
    assert pickle.loads(out.read_bytes())["device_traces"]
