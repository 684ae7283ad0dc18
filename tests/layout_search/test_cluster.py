"""Searches on a Dask cluster: a scheduler and workers that are started as the documentation says, and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from analyzer.errors import InputError
from analyzer.layout_search.executors import Workers, workers
from analyzer.layout_search.search import search_space
from tests.layout_search.tiny import Disturbed, same_for_all, tiny_space

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("distributed") is None and not os.environ.get("CI"), reason="the extra cluster is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler or worker of Dask, which is killed at the end."""
    command = [sys.executable, "-m", "dask", *words, "--no-dashboard"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


class Dask(NamedTuple):
    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]


@contextmanager
def dask(folder: Path, count: int) -> Iterator[Dask]:
    """A scheduler and `count` workers, which are connected."""
    from distributed import Client

    file = folder / "scheduler.json"
    with ExitStack() as stack:
        started = stack.enter_context(program("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)))
        common = ("--scheduler-file", str(file), "--nthreads", "1", "--no-nanny", "--local-directory", str(folder))
        found = [stack.enter_context(program("worker", *common)) for _ in range(count)]
        deadline = time.monotonic() + 60
        while not file.exists() or not file.read_text().endswith("}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = str(json.loads(file.read_text())["address"])
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(count, timeout=60)
        yield Dask(address, started, found)


def test_a_killed_worker_does_not_change_the_result(tmp_path: Path) -> None:
    space = tiny_space()
    with dask(tmp_path, 2) as started, workers(started.address) as found:
        result = search_space(space, Disturbed(found, started.workers[0].kill))
        assert started.workers[0].wait(timeout=10) == -signal.SIGKILL
        again = search_space(space, found)
    serial = same_for_all(search_space(space, Workers()))
    assert same_for_all(result) == serial
    assert same_for_all(again) == serial


def test_a_lost_scheduler_ends_the_search_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.layout_search.cluster.CONNECT_SECONDS", 3)
    with dask(tmp_path, 1) as started:
        begin = 0.0

        def kill() -> None:
            nonlocal begin
            started.scheduler.kill()
            begin = time.monotonic()

        with workers(started.address) as found:
            result = search_space(tiny_space(), Disturbed(found, kill))
        assert time.monotonic() - begin < 30
    assert not result.complete
    assert result.given is not None


def test_a_worker_that_runs_other_source_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.layout_search.executors.source_digest", lambda: "of another release")
    refused = pytest.raises(InputError, match=r"--info-workers: .* other source files")
    with dask(tmp_path, 1) as started, workers(started.address) as found, refused:
        search_space(tiny_space(), found)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:port", "http://127.0.0.1:8786"])
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(InputError, match=f"--info-workers: no Dask scheduler answers at {address} "), workers(address):
        pass


@pytest.mark.parametrize("listens", [False, True])
def test_a_scheduler_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch, *, listens: bool) -> None:
    monkeypatch.setattr("analyzer.layout_search.cluster.CONNECT_SECONDS", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InputError, match=f"--info-workers: no Dask scheduler answers at {address} ") as error, workers(address):
            pass
    assert "\n" not in str(error.value)
