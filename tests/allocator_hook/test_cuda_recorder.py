"""The CUDA recorder with a fake CUDA runtime (fake_cudart.c). These tests need neither a GPU nor PyTorch."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from pathlib import Path

import pytest

from allocator_hook.cuda.library import CudaRecorder
from analyzer.trace.reader import Allocation, CollectiveEvent, Free, Label, Mark, read_trace
from tests.cuda_hook import HAS_COMPILERS, HEADER, free, kinds, malloc, replay

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
"""Called by each function of the fake CUDA runtime with its name and its pointer argument."""
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_COMPILERS, reason="g++ and gcc are not installed")]


def test_allocations_marks_collectives_and_labels_are_recorded(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, _ = loaded
    with recorder:
        recorder.open(tmp_path / "trace", HEADER)
        recorder.enter("decoder.layers.0.mlp", "forward", 2, 1)
        one = malloc(recorder, 1000, 0, 0xABC)
        recorder.label(one or 0, "activation", "mlp.input", shape=(5, 100), dtype="bf16", bytes=1000)
        recorder.collective("all_gather", group="tp", members=(0, 1), shape=(3,), dtype="fp32", bytes=12, phase="forward")
        free(recorder, one, 0, 0xABC)
        recorder.leave("decoder.layers.0.mlp", "forward", 2, 1)
    trace = read_trace(tmp_path / "trace")
    assert (trace.header, trace.truncated, trace.skipped) == (HEADER, False, 0)
    enter, allocation, label, collective, freed, leave = trace
    assert isinstance(enter, Mark)
    assert (enter.kind, enter.name, enter.phase, enter.microbatch, enter.iteration) == (
        "enter", "decoder.layers.0.mlp", "forward", 2, 1,
    )  # fmt: skip
    assert isinstance(allocation, Allocation)
    assert (allocation.pointer, allocation.bytes, allocation.stream) == (one, 1000, 0xABC)
    assert isinstance(label, Label)
    assert (label.role, label.name, label.shape, label.bytes) == ("activation", "mlp.input", (5, 100), 1000)
    assert isinstance(collective, CollectiveEvent)
    assert (collective.members, collective.phase) == ((0, 1), "forward")
    assert isinstance(freed, Free)
    assert isinstance(leave, Mark)
    times = [event.time_ns for event in trace]
    assert times == sorted(times)


def test_current_and_peak_bytes_are_counted_per_device(loaded: tuple[CudaRecorder, ctypes.CDLL]) -> None:
    recorder, _ = loaded
    one, two, other = malloc(recorder, 100), malloc(recorder, 50), malloc(recorder, 7, device=3)
    free(recorder, one)
    assert (recorder.current_bytes(0), recorder.peak_bytes(0)) == (50, 150)
    assert (recorder.current_bytes(3), recorder.peak_bytes(3)) == (7, 7)
    recorder.reset_peak(0)
    assert recorder.peak_bytes(0) == 50
    free(recorder, two)
    free(recorder, other, device=3)
    assert [recorder.current_bytes(device) for device in range(8)] == [0] * 8
    assert recorder.current_bytes(99) == recorder.peak_bytes(-1) == 0


def test_a_trace_starts_with_the_live_allocations(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, _ = loaded
    one = malloc(recorder, 100)
    recorder.open(tmp_path / "trace", HEADER)
    with pytest.raises(OSError, match="busy"):
        recorder.open(tmp_path / "second", HEADER)
    free(recorder, one)
    recorder.close()
    assert kinds(list(read_trace(tmp_path / "trace"))) == ["Allocation", "Free"]
    assert replay(read_trace(tmp_path / "trace"))[1] == {0: 0}


def test_an_allocation_of_0_bytes_does_not_call_cuda(loaded: tuple[CudaRecorder, ctypes.CDLL]) -> None:
    recorder, runtime = loaded
    assert malloc(recorder, 0) is None
    free(recorder, None)
    assert (runtime.fake_calls(b"cudaMalloc"), runtime.fake_calls(b"cudaFree")) == (0, 0)


@pytest.mark.parametrize("pools", [0, 1])
def test_threads_on_separate_devices_are_recorded_correctly(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path, pools: int
) -> None:
    recorder, runtime = loaded
    runtime.fake_pools(pools)
    recorder.open(tmp_path / "trace", HEADER)
    runtime.fake_hammer(recorder.library.hook_malloc, recorder.library.hook_free, 4, 20_000)
    recorder.close()
    trace = read_trace(tmp_path / "trace")
    peak, current = replay(trace)
    assert len(trace) == 2 * 4 * 20_000
    assert peak == {device: recorder.peak_bytes(device) for device in range(4)}
    assert current == dict.fromkeys(range(4), 0)
    assert [runtime.fake_in_use(device) for device in range(8)] == [0] * 8
    assert bool(runtime.fake_calls(b"cudaFreeAsync")) == bool(pools)


def test_an_address_that_is_reused_immediately_is_never_live_twice(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path
) -> None:
    """Thread A is inside cudaFree(p), which has not returned. Thread B gets p. The trace must have A's free first."""
    recorder, runtime = loaded
    recorder.open(tmp_path / "trace", HEADER)
    pointer = malloc(recorder, 100)
    runtime.fake_free_delay_us(300_000)
    slow = threading.Thread(target=free, args=(recorder, pointer))
    slow.start()
    deadline = time.monotonic() + 5
    while runtime.fake_in_use(0) and time.monotonic() < deadline:
        time.sleep(0.001)
    again = malloc(recorder, 200)
    recorder.enter("while A is still in cudaFree", "forward")
    assert slow.is_alive(), "a lock was held during the CUDA call"
    slow.join()
    recorder.close()
    assert again == pointer
    assert kinds(list(read_trace(tmp_path / "trace"))) == ["Allocation", "Free", "Allocation", "Mark"]
    replay(read_trace(tmp_path / "trace"))


def test_a_free_is_recorded_before_it_happens(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, runtime = loaded
    recorder.open(tmp_path / "trace", HEADER)
    seen: list[list[str]] = []

    def look(name: bytes, _: int) -> None:
        if name == b"cudaFree":
            recorder.flush()
            seen.append(kinds(list(read_trace(tmp_path / "trace"))))

    pointer = malloc(recorder, 100)
    callback = CALLBACK(look)
    runtime.fake_on_call(callback)
    free(recorder, pointer)
    assert seen == [["Allocation", "Free"]]


def test_allocations_inside_cuda_calls_are_not_recorded(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    """The fake runtime allocates and frees through the hook during its own calls."""
    recorder, runtime = loaded
    recorder.open(tmp_path / "trace", HEADER)
    depth = 0

    def call_again(name: bytes, _: int) -> None:
        nonlocal depth
        if depth == 0 and name in (b"cudaMalloc", b"cudaFree"):
            depth += 1
            free(recorder, malloc(recorder, 77))
            depth -= 1

    callback = CALLBACK(call_again)
    runtime.fake_on_call(callback)
    pointer = malloc(recorder, 100)
    free(recorder, pointer)
    recorder.close()
    events = list(read_trace(tmp_path / "trace"))
    assert [event.bytes for event in events if isinstance(event, Allocation)] == [100]
    assert kinds(events) == ["Allocation", "Free"]
    assert runtime.fake_calls(b"cudaMalloc") == 3
    assert runtime.fake_in_use(0) == 0


def test_out_of_memory_is_an_event_and_a_null_pointer(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, runtime = loaded
    runtime.fake_capacity(1000)
    recorder.open(tmp_path / "trace", HEADER)
    one = malloc(recorder, 900)
    assert malloc(recorder, 200) is None
    flushed = list(read_trace(tmp_path / "trace"))  # a failure is written immediately, because the process may end soon
    free(recorder, one)
    assert malloc(recorder, 200) is not None
    recorder.close()
    assert [(event.bytes, event.failed) for event in flushed if isinstance(event, Allocation)] == [(900, False), (200, True)]
    assert (recorder.peak_bytes(), recorder.current_bytes()) == (900, 200)
    assert runtime.fake_last_error() == 0, "PyTorch's next check would see the error"


def test_a_full_pool_releases_unused_memory_before_an_allocation_fails(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path
) -> None:
    recorder, runtime = loaded
    runtime.fake_pools(1)
    runtime.fake_capacity(1000)
    runtime.fake_kept_by_pool(950)
    recorder.open(tmp_path / "trace", HEADER)
    assert malloc(recorder, 600) is not None
    recorder.close()
    assert runtime.fake_calls(b"cudaMemPoolTrimTo") == 1
    assert [event.failed for event in read_trace(tmp_path / "trace") if isinstance(event, Allocation)] == [False]


def test_frees_of_unknown_pointers_are_recorded_and_do_not_change_the_statistics(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path
) -> None:
    recorder, runtime = loaded
    recorder.open(tmp_path / "trace", HEADER)
    kept, gone = malloc(recorder, 10), malloc(recorder, 20)
    free(recorder, gone)
    free(recorder, gone)
    free(recorder, 0x1234)
    assert (recorder.current_bytes(), recorder.unknown_frees) == (10, 2)
    assert runtime.fake_last_error() == 0
    free(recorder, kept)
    recorder.close()
    events = list(read_trace(tmp_path / "trace"))
    assert [event.pointer for event in events if isinstance(event, Free)] == [gone, gone, 0x1234, kept]
    assert replay(read_trace(tmp_path / "trace"))[1] == {0: 0}


def test_memory_comes_from_the_pool_unless_the_mode_is_malloc(loaded: tuple[CudaRecorder, ctypes.CDLL]) -> None:
    recorder, runtime = loaded
    runtime.fake_pools(1)
    assert recorder.uses_pool(0)
    pooled = malloc(recorder, 10, 0, 0xA)
    assert runtime.fake_calls(b"keep everything") == 1
    recorder.set_mode("malloc")
    assert not recorder.uses_pool(0)
    plain = malloc(recorder, 10)
    free(recorder, pooled, 0, 0xA)  # each block is freed by the counterpart of its allocation
    free(recorder, plain)
    for name in (b"cudaMallocFromPoolAsync", b"cudaFreeAsync", b"cudaMalloc", b"cudaFree"):
        assert runtime.fake_calls(name) == 1, name


def test_a_free_waits_for_the_other_streams_that_use_the_memory(loaded: tuple[CudaRecorder, ctypes.CDLL]) -> None:
    recorder, runtime = loaded
    runtime.fake_pools(1)
    seen: list[tuple[bytes, int | None]] = []
    look = CALLBACK(lambda name, value: seen.append((name, value)))
    pointer = malloc(recorder, 10, 0, 0xA)
    for stream in (0xA, 0xB, 0xB):
        recorder.library.hook_record_stream(pointer, stream)
    callback = CALLBACK(look)
    runtime.fake_on_call(callback)
    free(recorder, pointer, 0, 0xA)
    assert seen == [(b"cudaEventRecord", 0xB), (b"cudaStreamWaitEvent", 0xA), (b"cudaFreeAsync", pointer)]


def test_the_current_device_is_restored_after_an_allocation_on_another(loaded: tuple[CudaRecorder, ctypes.CDLL]) -> None:
    recorder, runtime = loaded
    runtime.cudaSetDevice(1)
    pointer = malloc(recorder, 10, device=5)
    device = ctypes.c_int()
    runtime.cudaGetDevice(ctypes.byref(device))
    assert (device.value, runtime.fake_in_use(5), runtime.fake_in_use(1)) == (1, 10, 0)
    free(recorder, pointer, device=5)
    assert runtime.fake_in_use(5) == 0


def test_a_trace_that_cannot_be_opened_is_an_error(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, _ = loaded
    with pytest.raises(OSError, match="No such file"):
        recorder.open(tmp_path / "absent" / "trace", HEADER)
    assert not recorder.is_recording
    assert malloc(recorder, 1) is not None


def test_the_signal_mask_is_restored(loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path) -> None:
    recorder, _ = loaded
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    recorder.open(tmp_path / "trace", HEADER)
    recorder.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
