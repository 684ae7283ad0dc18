"""The sources that an import would run, and traces that belong to their content. No package is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allocator_hook import packages
from allocator_hook.shadow import engine
from allocator_hook.shadow.request import Request
from allocator_hook.sources import MEGATRON, Source, digests, source_of
from analyzer.trace.events import Header
from tests.job_of import job_of

VERSION = "MAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = '{}'\nVERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `megatron.core` that fails if it is imported, first on the module search path."""
    folder = tmp_path / "checkout"
    (folder / "megatron/core/transformer").mkdir(parents=True)
    (folder / "megatron/core/__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "megatron/core/package_info.py").write_text(VERSION.format(""))
    (folder / "megatron/core/transformer/mlp.py").write_text("size = 1\n")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_a_checkout_comes_before_the_installed_package(checkout: Path) -> None:
    assert source_of(MEGATRON) == Source(checkout / "megatron/core")
    assert packages.folders()["megatron-core"] == str(checkout / "megatron/core")


def test_the_release_is_that_of_the_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.13.0", "megatron-core": "0.16.1"}.get)
    assert packages.installed()["megatron-core"] == "0.18.2"
    (checkout / "megatron/core/package_info.py").write_text(VERSION.format("rc0"))
    assert packages.installed()["megatron-core"] == "0.18.2rc0"
    (checkout / "megatron/core/package_info.py").write_text("MAJOR = 0\n")
    assert packages.installed()["megatron-core"] == "0.16.1"


def test_a_package_that_is_not_found_has_no_source() -> None:
    assert source_of("no_such_package.core") is None
    assert source_of("xml.no_such_module") is None


def test_the_digest_depends_on_contents_and_names_only(checkout: Path) -> None:
    file = checkout / "megatron/core/transformer/mlp.py"
    before = digests()[MEGATRON]
    os.utime(file, (1, 1))
    (checkout / "megatron/core/README.md").write_text("not imported\n")
    assert digests()[MEGATRON] == before
    file.write_text("size = 2\n")
    edited = digests()[MEGATRON]
    assert edited != before
    file.rename(file.with_name("other.py"))
    assert digests()[MEGATRON] not in (before, edited)


def test_a_file_that_cannot_be_read_is_left_out(checkout: Path) -> None:
    before = digests()[MEGATRON]
    (checkout / "megatron/core/.#mlp.py").symlink_to("user@host.1234")
    assert digests()[MEGATRON] == before


def test_an_edited_checkout_gets_a_new_trace(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allocator_hook.trace_writer import TraceWriter

    recorded = []

    def work(request: Request, folder: Path, finished: object) -> None:
        del folder
        for rank, path in request.traces.items():
            recorded.append(rank)
            header = Header(recorder="shadow", argv=(), versions=request.versions, gpu="X", rank=rank, world_size=8, extra={})
            with TraceWriter(path, header):
                pass
            finished(rank)  # type: ignore[operator]

    monkeypatch.setattr(engine, "_work", work)
    monkeypatch.setattr(engine, "installed", lambda: {"torch": "2.13.0", "megatron-core": "0.18.2"})
    job = job_of("--global-batch-size 8")

    def run() -> Path:
        return engine.run(job, [0], cache_dir=tmp_path / "cache")[0]

    first = run()
    assert run() == first
    assert recorded == [0]
    file = checkout / "megatron/core/transformer/mlp.py"
    file.write_text("size = 2\n")
    assert run() != first
    assert recorded == [0, 0]
    file.write_text("size = 1\n")
    assert run() == first
    assert recorded == [0, 0]


@pytest.mark.slow
def test_a_worker_imports_the_same_sources(checkout: Path, tmp_path: Path) -> None:
    """Also if the working directory, which `python -m` adds to the search path, has another checkout."""
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("")
    code = "from allocator_hook.sources import source_of; print(source_of('megatron.core').folder)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(engine._search_path())}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(checkout / "megatron/core"), done.stderr
