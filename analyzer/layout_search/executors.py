"""Runs the tasks of a search in this process, in several processes, or on a Dask cluster.

A task has everything that it needs, so that any worker can run it, and run it again if another one has died.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.layout_search.evaluation import Evaluation
    from analyzer.layout_search.nodes import Cutoffs, Expander, Node

ATTEMPTS: Final = 5
"""Times that a task is started before the search ends with what it has."""
SCHEMES: Final = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")


class Task(NamedTuple):
    """Nodes to expand."""

    space: bytes
    """The pickled `Space`."""
    nodes: tuple[Node, ...]
    cutoffs: Cutoffs


class Outcome(NamedTuple):
    """What nodes were expanded into."""

    nodes: tuple[Node, ...]
    evaluations: tuple[Evaluation, ...]


@lru_cache(maxsize=2)
def _expander(space: bytes) -> Expander:
    """The expander of a space, with its caches, once for each process."""
    from analyzer.layout_search.nodes import Expander

    return Expander(pickle.loads(space))


def run_task(task: Task) -> Outcome:
    """Expands the nodes of a task."""
    from analyzer.layout_search.evaluation import Evaluation

    expander = _expander(task.space)
    nodes: list[Node] = []
    evaluations: list[Evaluation] = []
    for node in task.nodes:
        found = expander.expand(node, task.cutoffs)
        if isinstance(found, Evaluation):
            evaluations.append(found)
        elif found is not None:
            nodes.extend(found)
    return Outcome(tuple(nodes), tuple(evaluations))


class SerialExecutor(Executor):
    """Runs a call when its result is asked for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs `fn` at once."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ClusterLostError(Exception):
    """The workers are lost and cannot be started again."""


class Workers:
    """Runs the tasks of a round, and repeats those whose worker has died."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self._executor: Executor | None = None

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes in the order of the tasks. Raises ClusterLostError if a task cannot be finished."""
        left = dict(enumerate(tasks))
        done: dict[int, Outcome] = {}
        for _ in range(ATTEMPTS):
            self._attempt(left, done)
            if not left:
                break
            self.close()
        if left:
            raise ClusterLostError
        yield from (done[position] for position in range(len(tasks)))

    def _attempt(self, left: dict[int, Task], done: dict[int, Outcome]) -> None:
        """Runs tasks; those whose worker has died stay in `left`."""
        try:
            if self._executor is None:
                self._executor = self._start()
            futures = {position: self._executor.submit(run_task, task) for position, task in left.items()}
        except (BrokenProcessPool, OSError, RuntimeError):
            return
        for position, future in futures.items():
            try:
                done[position] = future.result()
            except _lost_workers():
                continue
            del left[position]

    def close(self) -> None:
        """Ends the workers without waiting for their tasks."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _lost_workers() -> tuple[type[BaseException], ...]:
    """The errors of tasks whose worker has died."""
    import sys
    from concurrent.futures import CancelledError

    found: list[type[BaseException]] = [BrokenProcessPool, CancelledError, OSError]
    if "distributed" in sys.modules:
        from distributed import KilledWorker

        found.append(KilledWorker)
    return tuple(found)


@contextmanager
def workers(where: str | None) -> Iterator[Workers]:
    """The workers of `--info-workers`: a number of processes, or the address of a Dask scheduler. Raises InputError."""
    if where is not None and where.startswith(SCHEMES):
        with _cluster(where) as start:
            found = Workers(start)
            yield found
        return
    count = usual_workers() if where is None else int(where)
    found = Workers(SerialExecutor if count == 1 else lambda: ProcessPoolExecutor(count, initializer=_start_worker))
    try:
        yield found
    finally:
        found.close()


def usual_workers() -> int:
    """Processors that this process may use."""
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker() -> None:
    """Prepares a worker: Ctrl-C ends the search in the main process, and evaluations make no reference cycles."""
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()


@contextmanager
def _cluster(address: str) -> Iterator[Callable[[], Executor]]:
    """A function that gives the executor of a Dask cluster."""
    try:
        from distributed import Client
    except ImportError:
        raise InputError(
            "--info-workers", "an address needs the package distributed", 'install it with pip install ".[cluster]"'
        ) from None
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise InputError("--info-workers", f"no scheduler answers at {address} ({error})", "start one, or give a number") from None
    try:
        yield lambda: client.get_executor(pure=False)
    finally:
        client.close()
