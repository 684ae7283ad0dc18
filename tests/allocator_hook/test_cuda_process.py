"""The CUDA recorder in processes that are killed, fork, have a full disk, or run out of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from analyzer.trace.reader import Mark, read_trace
from tests.cuda_hook import HAS_COMPILERS, REPOSITORY, kinds, replay

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_COMPILERS, reason="g++ and gcc are not installed")]


PRELUDE = """
import ctypes, os, signal, sys, threading, time
from allocator_hook.cuda.library import CudaRecorder
from analyzer.trace.reader import Header
recorder, runtime = CudaRecorder(sys.argv[1]), ctypes.CDLL(os.environ["ALLOCATOR_HOOK_CUDART"])
malloc, free = recorder.library.hook_malloc, recorder.library.hook_free
path = sys.argv[2]
"""


@pytest.fixture
def start(binaries: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that runs code in a Python process with the recorder. Its trace is tmp_path/trace."""
    running: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(code), str(binaries[0]), str(tmp_path / "trace")],
                env=os.environ | {"ALLOCATOR_HOOK_CUDART": str(binaries[1]), "PYTHONPATH": str(REPOSITORY)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("wait", [0.0, 0.013, 0.04])
def test_a_killed_process_leaves_a_readable_trace(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path, wait: float
) -> None:
    process = start("""
        recorder.open(path, Header(recorder="cuda"))
        print("open", flush=True)
        while True:
            runtime.fake_hammer(malloc, free, 3, 1000)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    size_at_open = (tmp_path / "trace").stat().st_size
    while (tmp_path / "trace").stat().st_size <= size_at_open:
        time.sleep(0.001)
    time.sleep(wait)
    process.kill()
    process.wait()
    trace = read_trace(tmp_path / "trace")
    assert trace.truncated
    assert len(trace) >= 85
    replay(trace)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_an_exit_without_close_leaves_every_record(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start("""
        recorder.open(path, Header(recorder="cuda"))
        free(malloc(5, 0, None), 0, 0, None)
    """)
    assert process.communicate(timeout=20) == ("", "")
    trace = read_trace(tmp_path / "trace")
    assert (kinds(list(trace)), trace.truncated) == (["Allocation", "Free"], True)


def test_a_forked_child_does_not_write_to_the_trace_of_its_parent(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Children are forked while threads record. Each child uses the hook and opens its own trace."""
    process = start("""
        recorder.open(path, Header(recorder="cuda"))
        busy = threading.Thread(target=runtime.fake_hammer, args=(malloc, free, 3, 100_000))
        busy.start()
        for number in range(8):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                was_recording = recorder.is_recording
                recorder.enter("child", "forward")
                recorder.open(f"{path}.{number}", Header(recorder="cuda"))
                recorder.enter("child", "forward")
                recorder.close()
                os._exit(1 if was_recording else 0)
            assert os.waitpid(child, 0)[1] == 0
        assert recorder.is_recording
        recorder.enter("parent", "forward")
        busy.join()
        recorder.close()
    """)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    trace = read_trace(tmp_path / "trace")
    assert [event.name for event in trace if isinstance(event, Mark)] == ["parent"]
    assert len(trace) == 2 * 3 * 100_000 + 1
    assert not trace.truncated
    for number in range(8):
        marks = [event.name for event in read_trace(tmp_path / f"trace.{number}") if isinstance(event, Mark)]
        assert marks == ["child"]


def test_a_full_disk_stops_the_recording_with_one_message(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    limit = 50_000  # not a multiple of the record size: the last record is incomplete
    process = start(f"""
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        recorder.open(path, Header(recorder="cuda"))
        runtime.fake_hammer(malloc, free, 2, 50_000)
        recorder.close()
        print(recorder.is_recording, recorder.current_bytes(), recorder.peak_bytes() > 0)
    """)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "False 0 True\n")
    assert err.count("\n") == 1
    assert "recording stopped" in err
    assert "File too large" in err
    trace = read_trace(tmp_path / "trace")
    assert (tmp_path / "trace").stat().st_size == limit
    assert trace.truncated
    assert len(trace) > 900
    replay(trace)


def test_a_failed_allocation_throws_an_exception(binaries: tuple[Path, Path], tmp_path: Path) -> None:
    """PyTorch does not check for null pointers (CUDAPluggableAllocator::malloc). An exception becomes a RuntimeError."""
    source = tmp_path / "caller.cpp"
    source.write_text("""
        #include <cstdio>
        #include <dlfcn.h>
        #include <exception>
        #include <sys/types.h>
        int main(int, char** argv) {
          void* hook = dlopen(argv[1], RTLD_NOW);
          void* runtime = dlopen(argv[2], RTLD_NOW);
          reinterpret_cast<void (*)(int)>(dlsym(hook, "hook_set_throws"))(1);
          reinterpret_cast<void (*)(int)>(dlsym(runtime, "fake_fail_next"))(1);
          try {
            reinterpret_cast<void* (*)(ssize_t, int, void*)>(dlsym(hook, "hook_malloc"))(12345, 2, nullptr);
          } catch (const std::exception& error) {
            std::puts(error.what());
          }
        }
    """)
    subprocess.run(["g++", str(source), "-o", str(tmp_path / "caller"), "-ldl"], check=True)
    done = subprocess.run(
        [str(tmp_path / "caller"), *map(str, binaries)],
        env={"ALLOCATOR_HOOK_CUDART": str(binaries[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("CUDA out of memory: the allocator hook cannot allocate 12345 bytes on device 2")
