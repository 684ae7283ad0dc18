"""Compiling the CUDA recorder, finding the CUDA runtime, and installing the recorder into PyTorch."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from allocator_hook.cuda import build as build_module
from allocator_hook.cuda.build import build
from allocator_hook.cuda.install import install
from allocator_hook.cuda.library import CudaRecorder
from analyzer.errors import InputError
from analyzer.trace.reader import read_trace
from tests.cuda_hook import HAS_COMPILERS, HEADER, REPOSITORY, free, kinds, malloc

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_COMPILERS, reason="g++ and gcc are not installed")]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_recorder_uses_the_runtime_of_the_process(binaries: tuple[Path, Path], is_loaded: bool) -> None:
    code = """
        import ctypes, sys
        from allocator_hook.cuda.library import CudaRecorder
        runtime = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else None
        recorder = CudaRecorder(sys.argv[1])
        print(recorder.runtime_error or "found", recorder.library.hook_malloc(1, 0, None) is not None)
    """
    arguments = map(str, binaries if is_loaded else binaries[:1])
    environment = {name: value for name, value in os.environ.items() if name != "ALLOCATOR_HOOK_CUDART"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = "found True" if is_loaded else "no CUDA runtime (libcudart) is loaded in this process False"
    assert done.stdout == expected + "\n"


def test_build_prints_the_path_last_and_compiles_once(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "allocator_hook.cuda.build"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    library = Path(first.stdout.splitlines()[-1])
    assert library.is_relative_to(tmp_path)
    made = library.stat().st_mtime_ns
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (second.stdout.splitlines()[-1], library.stat().st_mtime_ns) == (str(library), made)
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@pytest.mark.parametrize(("compiler", "fault"), [("true", "true wrote no library"), ("g++ '", "No closing quotation")])
def test_a_compiler_that_is_none_is_refused(compiler: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(InputError, match=re.escape(fault)):
        build()


def test_build_failures_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no compiler no-such-compiler; install g"):
        build()
    monkeypatch.delenv("CXX")
    broken = tmp_path / "recorder.cpp"
    broken.write_text("int main( { }")
    monkeypatch.setattr(build_module, "SOURCE", broken)
    with pytest.raises(InputError, match=r"does not compile \(.*error"):
        build()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME"):
        build()


class FakeTorch:
    """The part of torch that install() uses, with a GPU of the fake CUDA runtime."""

    __version__ = "2.9.0+cu128"

    def __init__(
        self, *, cuda: str | None = "12.8", initialized: bool = False, devices: int = 1, has_record_stream: bool = True
    ) -> None:
        self.version = SimpleNamespace(cuda=cuda)
        self.installed: list[tuple[str, ...]] = []
        self.record_stream: list[int] = []
        native = SimpleNamespace(set_record_stream_fn=self.record_stream.append) if has_record_stream else SimpleNamespace()
        memory = SimpleNamespace(
            CUDAPluggableAllocator=lambda *arguments: SimpleNamespace(arguments=arguments, allocator=lambda: native),
            change_current_allocator=lambda allocator: self.installed.append(allocator.arguments),
        )
        self.cuda = SimpleNamespace(is_initialized=lambda: initialized, device_count=lambda: devices, memory=memory)


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (FakeTorch(cuda=None), "2.9.0.* is built without CUDA"),
        (FakeTorch(initialized=True), "CUDA was used before"),
        (FakeTorch(devices=0), "no GPU"),
    ],
)
def test_install_rejects_unsupported_states_of_torch(torch: FakeTorch, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        install(tmp_path / "trace", HEADER, torch=torch)
    assert torch.installed == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_record_stream", [True, False])
def test_install_replaces_the_allocator(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_record_stream: bool
) -> None:
    """Without record_stream support in PyTorch, cudaMalloc is used: its free synchronizes all streams."""
    ours, runtime = loaded
    runtime.fake_pools(1)
    monkeypatch.setattr("allocator_hook.cuda.install.build", lambda: ours.path)
    torch = FakeTorch(has_record_stream=has_record_stream)
    recorder = install(tmp_path / "trace", HEADER, torch=torch)
    assert torch.installed == [(str(ours.path), "hook_malloc", "hook_free")]
    assert len(torch.record_stream) == has_record_stream
    assert recorder.uses_pool() == has_record_stream
    free(recorder, malloc(recorder, 64))
    recorder.close()
    assert kinds(list(read_trace(tmp_path / "trace"))) == ["Allocation", "Free"]
    ours.library.hook_set_throws(0)


def test_install_fails_if_pytorch_reports_earlier_use_of_cuda(
    loaded: tuple[CudaRecorder, ctypes.CDLL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("Can't swap an already initialized allocator")

    monkeypatch.setattr("allocator_hook.cuda.install.build", lambda: loaded[0].path)
    torch = FakeTorch()
    torch.cuda.memory.change_current_allocator = fail
    with pytest.raises(InputError, match="CUDA was used before"):
        install(tmp_path / "trace", HEADER, torch=torch)
    assert not (tmp_path / "trace").exists()
