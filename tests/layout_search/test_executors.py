"""Searches with processes and with a Dask cluster, some of which die: the result is that of a search in one process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.layout_search.executors import (
    ATTEMPTS,
    ClusterLostError,
    RemoteWorkers,
    Task,
    TaskError,
    Workers,
    source_digest,
    workers,
    workers_of,
)
from analyzer.layout_search.nodes import Cutoffs, root_nodes
from analyzer.layout_search.processes import ProcessExecutor
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.search import search_space
from tests.layout_search.tiny import ARGV, Disturbed, same_for_all, tiny_space

ROOT = Path(__file__).resolve().parents[2]
SPACE = tiny_space()


@pytest.fixture(scope="module")
def serial() -> SearchResult:
    result = search_space(SPACE, Workers())
    assert result.complete
    assert len(result.best) > 5
    return result


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def worker_processes(parent: int) -> list[int]:
    """The worker processes that `parent` has started."""
    children = Path(f"/proc/{parent}/task")
    pids = {int(pid) for path in children.glob("*/children") for pid in path.read_text().split()}
    return sorted(pid for pid in pids if b"layout_search.processes" in Path(f"/proc/{pid}/cmdline").read_bytes())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("value", ["0", "-1", "abc", "", "1.5", "1_0", "localhost:8786"])
def test_wrong_values_name_the_option(value: str) -> None:
    with pytest.raises(InputError, match="--info-workers: ") as error, workers(value):
        pass
    assert "tcp://host:8786" in error.value.remedy


def test_values() -> None:
    assert workers_of("8") == 8
    assert workers_of("tcp://10.0.0.1:8786") == "tcp://10.0.0.1:8786"


def test_without_a_number_all_processors_are_used() -> None:
    with workers("1") as one, workers(None) as usual:
        assert type(one) is Workers
        assert isinstance(usual, RemoteWorkers) == (len(os.sched_getaffinity(0)) > 1)


@pytest.mark.slow
def test_processes_find_the_same(serial: SearchResult) -> None:
    with workers("2") as two:
        assert same_for_all(search_space(SPACE, two)) == same_for_all(serial)
        pids = worker_processes(os.getpid())
        assert len(pids) == 2
    assert not any(map(running, pids))


@pytest.mark.slow
def test_tasks_of_killed_processes_are_repeated(serial: SearchResult) -> None:
    killed = []

    def kill() -> None:
        for pid in worker_processes(os.getpid()):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with workers("2") as two:
        assert same_for_all(search_space(SPACE, Disturbed(two, kill, rounds=2))) == same_for_all(serial)
    assert len(killed) == len(set(killed)) == 4


class Failing(Executor):
    """Runs calls in this process, but the first ones fail with the errors that are given."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self.errors = list(errors)
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        if self.errors:
            future.set_exception(self.errors.pop(0))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_the_search_ends_with_what_it_has_when_its_workers_always_die() -> None:
    executor = Failing([])
    result = search_space(SPACE, Disturbed(RemoteWorkers(executor), lambda: executor.errors.extend([BrokenExecutor()] * 1000)))
    assert not result.complete
    assert result.given is not None


def test_tasks_are_started_again_while_others_finish() -> None:
    tasks = [Task(pickle.dumps(SPACE), (), Cutoffs(1.0, 1.0))] * 3
    executor = Failing([BrokenExecutor()] * (3 * ATTEMPTS - 1))
    assert len(list(RemoteWorkers(executor).run(tasks))) == 3
    with pytest.raises(ClusterLostError):
        list(RemoteWorkers(Failing([BrokenExecutor()] * 3 * ATTEMPTS)).run(tasks))


def test_an_executor_that_refuses_tasks_is_lost_only_if_it_is_not_alive() -> None:
    task = Task(pickle.dumps(SPACE), (), Cutoffs(1.0, 1.0))
    executor = ProcessExecutor(1)
    executor.shutdown()
    with pytest.raises(ClusterLostError):
        list(RemoteWorkers(executor, is_alive=lambda: False).run([task]))
    with pytest.raises(RuntimeError, match="after shutdown"):
        list(RemoteWorkers(executor).run([task]))


def test_workers_that_cannot_run_a_task_are_refused() -> None:
    task = Task(pickle.dumps(SPACE), (), Cutoffs(1.0, 1.0))
    executor = Failing([ModuleNotFoundError("No module named 'analyzer'")])
    with pytest.raises(InputError, match=r"--info-workers: .*No module named 'analyzer'"):
        list(RemoteWorkers(executor).run([task]))
    with pytest.raises(InputError, match=r"--info-workers: .* other source files"):
        list(RemoteWorkers(Failing([]), digest="of another release").run([task]))
    assert len(list(RemoteWorkers(Failing([]), digest=source_digest()).run([task]))) == 1


def test_an_error_in_a_task_is_raised_and_not_repeated() -> None:
    wrong = Task(b"no space", (next(root_nodes(SPACE)),), Cutoffs(1.0, 1.0))
    executor = Failing([])
    with pytest.raises(TaskError, match="UnpicklingError"):
        list(RemoteWorkers(executor).run([wrong]))
    assert executor.calls == 1
    with workers("1") as one, pytest.raises(pickle.UnpicklingError):
        list(one.run([wrong]))


def test_processes_pass_results_and_errors() -> None:
    executor = ProcessExecutor(1)
    assert executor.submit(pow, 2, 3).result(timeout=20) == 8
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        executor.submit(divmod, 1, 0).result(timeout=20)
    assert isinstance(executor.submit(os._exit, 1).exception(timeout=20), BrokenExecutor)
    assert executor.submit(pow, 2, 4).result(timeout=20) == 16, "another process takes the place of the dead one"
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(pow, 2, 3)


def test_processes_that_cannot_be_started_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    executor = ProcessExecutor(1)
    assert isinstance(executor.submit(pow, 2, 3).exception(timeout=20), BrokenExecutor)
    executor.shutdown()


SCRIPT = """
    import os, sys
    from analyzer import search

    def progress(_):
        print("round", flush=True)

    result = search(sys.argv[1], workers=2, environ={}, folder="/", progress=progress)  # the module has no "if __name__ ..."
    print("complete" if result.complete else "interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_program_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), ARGV]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "round\n"
        pids = worker_processes(program.pid)
        assert len(pids) == 2
        program.send_signal(number)
        out, err = program.communicate(timeout=10)
        wait_until(lambda: not any(map(running, pids)))
    assert err == ""
    if number == signal.SIGINT:
        assert out.splitlines()[-1] == "interrupted"
        assert program.returncode == 0
    else:
        assert program.returncode == -number
