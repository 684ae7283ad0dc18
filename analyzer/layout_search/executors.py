"""Runs the tasks of a search in this process, in several processes, or on a Dask cluster.

A task has everything that it needs, so that any worker can run it, and run it again if another one has died.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.errors import InputError
from analyzer.memory.collector import collector_paused

if TYPE_CHECKING:
    from analyzer.layout_search.evaluation import Evaluation
    from analyzer.layout_search.nodes import Cutoffs, Expander, Node

ATTEMPTS: Final = 5
"""Times that the tasks of a round are started without finishing one before the search ends with what it has."""
POLL_SECONDS: Final = 1.0
"""Time between two looks whether the workers are still there."""
_one_at_a_time: Final = Lock()
"""The threads of a worker share the caches of an expander."""


class Task(NamedTuple):
    """Nodes to expand."""

    space: bytes
    """The pickled `Space`: about 20 kB, so that it can be sent with every task."""
    nodes: tuple[Node, ...]
    cutoffs: Cutoffs


class Outcome(NamedTuple):
    """What nodes were expanded into."""

    nodes: tuple[Node, ...]
    evaluations: tuple[Evaluation, ...]


class ClusterLostError(Exception):
    """The workers are lost and cannot be started again."""


class TaskError(Exception):
    """A task has failed on a worker, because of a mistake in the program. The message is the traceback of the worker."""


@lru_cache(maxsize=2)
def _expander(space: bytes) -> Expander:
    """The expander of a space, with its caches, once for each process."""
    from analyzer.layout_search.nodes import Expander

    return Expander(pickle.loads(space))


def run_task(task: Task) -> Outcome:
    """Expands the nodes of a task."""
    from analyzer.layout_search.evaluation import Evaluation

    nodes: list[Node] = []
    evaluations: list[Evaluation] = []
    with _one_at_a_time, collector_paused():
        expander = _expander(task.space)
        for node in task.nodes:
            found = expander.expand(node, task.cutoffs)
            if isinstance(found, Evaluation):
                evaluations.append(found)
            elif found is not None:
                nodes.extend(found)
    return Outcome(tuple(nodes), tuple(evaluations))


def run_pickled(task: bytes, digest: str) -> bytes:
    """Runs a pickled `Task` on a worker; its pickled `Outcome`, or the text of an error.

    `digest`: the source files of the program, empty if the worker has the same ones. Bytes keep a cluster from looking into tasks,
    and an error is part of the answer so that it is not taken for the loss of a worker.
    """
    if digest not in ("", source_digest()):
        return pickle.dumps(None)
    try:
        return pickle.dumps(run_task(pickle.loads(task)))
    except Exception:
        return pickle.dumps(traceback.format_exc())


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the files of this package, to recognize workers that have other ones."""
    import hashlib
    from pathlib import Path

    folder = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


class Workers:
    """Runs the tasks of a round in this process."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """The outcomes in the order of the tasks. Raises ClusterLostError if a task cannot be finished, TaskError if one fails."""
        yield from map(run_task, tasks)


class RemoteWorkers(Workers):
    """Runs the tasks of a round with an executor, and repeats those whose worker has died."""

    def __init__(
        self,
        executor: Executor,
        lost: tuple[type[BaseException], ...] = (BrokenExecutor,),
        *,
        is_alive: Callable[[], bool] = lambda: True,
        digest: str = "",
    ) -> None:
        self._executor = executor
        self._lost = lost
        self._is_alive = is_alive
        self._digest = digest

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        left = {position: pickle.dumps(task) for position, task in enumerate(tasks)}
        done: dict[int, Outcome] = {}
        following = failures = 0
        while left:
            before = len(left)
            for position, outcome in self._attempt(left):
                del left[position]
                done[position] = outcome
                while following in done:
                    yield done.pop(following)
                    following += 1
            failures = 0 if len(left) < before else failures + 1
            if failures == ATTEMPTS:
                raise ClusterLostError(f"tasks were started {ATTEMPTS} times, and their workers died")

    def _attempt(self, left: dict[int, bytes]) -> Iterator[tuple[int, Outcome]]:
        """The outcomes of the tasks whose worker does not die."""
        try:
            futures = [(position, self._executor.submit(run_pickled, task, self._digest)) for position, task in list(left.items())]
        except Exception as error:
            if not self._is_alive():
                raise ClusterLostError("the connection to the scheduler is lost") from error
            if isinstance(error, self._lost):
                return
            raise
        for position, future in futures:
            answer = self._answer(future)
            if answer is not None:
                yield position, _outcome(answer)

    def _answer(self, future: Future[bytes]) -> bytes | None:
        """The answer of a task; None if its worker has died."""
        while not wait([future], POLL_SECONDS).done:
            if not self._is_alive():
                raise ClusterLostError("the connection to the scheduler is lost")
        try:
            return future.result()
        except self._lost:
            return None
        except Exception as error:
            raise _unusable(f"the workers cannot run tasks ({' '.join(str(error).split())})") from error


def _outcome(answer: bytes) -> Outcome:
    found: Outcome | str | None = pickle.loads(answer)
    if found is None:
        raise _unusable("a worker has other source files of this program")
    if isinstance(found, str):
        raise TaskError(found)
    return found


def _unusable(fault: str) -> InputError:
    return InputError("--info-workers", fault, "start the scheduler and its workers in the Python environment of this process")


def workers_of(value: str) -> int | str:
    """The value of `--info-workers`: a number of processes, or the address of a Dask scheduler. Raises InputError."""
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    if "://" in value:
        return value
    fault = f"'{value}' is neither a number of processes nor the address of a Dask scheduler"
    raise InputError("--info-workers", fault, "give a number of 1 or more, or an address such as tcp://host:8786")


@contextmanager
def workers(where: str | None) -> Iterator[Workers]:
    """The workers of `--info-workers`, one process per processor if None. Ends them and their tasks. Raises InputError."""
    place = usual_workers() if where is None else workers_of(where)
    if isinstance(place, str):
        from analyzer.layout_search.cluster import cluster

        with cluster(place) as found:
            yield RemoteWorkers(found.executor, found.lost, is_alive=found.is_alive, digest=source_digest())
    elif place == 1:
        yield Workers()
    else:
        from analyzer.layout_search.processes import ProcessExecutor

        executor = ProcessExecutor(place)
        for _ in range(place):  # so that they are ready for the first round
            executor.submit(_import)
        try:
            yield RemoteWorkers(executor)
        finally:
            executor.shutdown(cancel_futures=True)


def _import() -> None:
    """Imports what a task needs."""
    import analyzer.layout_search.nodes  # noqa: F401


def usual_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
