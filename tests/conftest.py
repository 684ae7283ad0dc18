"""Settings of every test run, and fixtures with the compiled CUDA recorder and the fake CUDA runtime."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from allocator_hook.cuda.build import build
from allocator_hook.cuda.library import CudaRecorder
from tests.examples import DEFAULT, QUICK, examples

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=examples(DEFAULT))
settings.load_profile("quick" if QUICK else "ci" if os.environ.get("CI") else "local")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of torch that wait for each other use processors of other workers
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and reports take their width from it


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from what lives until the end: thousands of tests, tables and cached module trees.

    The quick tests end before a collection could save memory: all of them in one process need 1.8 GB.
    """
    gc.freeze()
    if QUICK:
        gc.disable()
    else:
        gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_files_have_made() -> None:
    """A search collects garbage itself, from time to time. In quick tests it need not go over the caches of other tests."""
    if QUICK:
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the end of the process free what the tests have made: to search it for cycles takes seconds."""
    gc.freeze()


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Paths of the recorder and the fake runtime, compiled into a temporary folder."""
    folder = tmp_path_factory.mktemp("binaries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        recorder = build()
    runtime = folder / "libcudart-fake.so"
    source = Path(__file__).with_name("fake_cudart.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-pthread", str(source), "-o", str(runtime)], check=True)
    return recorder, runtime


@pytest.fixture
def loaded(
    binaries: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CudaRecorder, ctypes.CDLL]]:
    """A recorder and a fake runtime with their own state: each test loads copies of the libraries."""
    recorder_path = shutil.copy(binaries[0], tmp_path / "recorder.so")
    runtime_path = shutil.copy(binaries[1], tmp_path / "libcudart.so")
    monkeypatch.setenv("ALLOCATOR_HOOK_CUDART", str(runtime_path))
    runtime = ctypes.CDLL(str(runtime_path))
    runtime.fake_capacity.argtypes = runtime.fake_kept_by_pool.argtypes = [ctypes.c_uint64]
    runtime.fake_in_use.restype = ctypes.c_uint64
    recorder = CudaRecorder(recorder_path)
    assert recorder.runtime_error == ""
    yield recorder, runtime
    runtime.fake_on_call(None)
    recorder.close()
