"""Searches the fastest layouts that fit: best first, with bounds that leave out only what cannot be in the result.

What is in the result depends on the aim: the fastest layout, the ten fastest and the front of memory and time, or one that fits.
Nodes are expanded in rounds of a fixed size, those with the lowest bound of the time first. A round depends on the rounds before it
only, so that the result and the number of evaluated layouts do not depend on the number of workers.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Final, Literal, NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.executors import ClusterLostError, Task, Workers
from analyzer.layout_search.nodes import Cutoffs, Node, root_nodes, with_more_overlaps
from analyzer.layout_search.result import ERROR_OF_ORDER, INTERRUPTED, LIMIT, SearchResult, front_of, order
from analyzer.layout_search.smallest_change import smallest_change
from analyzer.layout_search.space import Split, Stages
from analyzer.memory.collector import collector_paused

SMALL: Final = 20_000
"""Layouts of a space below which a search takes a few seconds in one process."""
FEW: Final = 50_000
"""Layouts of a space below which a search for all of its result takes a few seconds."""
BEST: Final = 10
"""Layouts of the result."""
BETWEEN_PROGRESS: Final = 0.1
"""Seconds between two calls that report the progress."""
FRONT: Final = 1.25
"""Time of the slowest layout on the front, relative to the fastest."""
COSTS: Final = {"split": 2, "distribution": 16, "layout": 2}
"""Cost of expanding a node, for tasks of about equal length."""
TASK: Final = 16
ROUNDS: Final = {"table": 16 * TASK, "fastest": 8 * TASK, "any": 4 * TASK}
"""Cost of the nodes of a task and of a round for each aim. They do not depend on the number of workers."""

Aim = Literal["fastest", "table", "any"]
"""What a search proves: that its first layout is the fastest that fits, the same of all layouts of its result, or only whether a
layout fits."""

Distribution = tuple[int, Split, Stages]
"""A setting without overlaps, a split and a distribution of layers: a layout without its recomputation and overlaps."""


class Progress(NamedTuple):
    """The state of a search after a round."""

    expanded: int
    """Nodes that were expanded: splits, distributions of layers and layouts."""
    open: int
    """Nodes that may still have to be expanded. Their number can grow."""
    evaluated: int
    best_seconds: float | None
    """The time of the fastest layout that fits so far."""


class _State:
    """What a search has found so far."""

    def __init__(self, space: Space, aim: Aim, most_seconds: float = inf) -> None:
        self._space = space
        self.aim = aim
        self._most_seconds = most_seconds
        self.evaluations: dict[str, Evaluation] = {}
        self.fastest: dict[Distribution, Evaluation] = {}
        """The fastest recomputation and overlaps for each distribution of layers."""
        self.heap: list[tuple[float, int, Node]] = []
        """Open nodes with the bound of their time and the order in which they were found."""
        self._found = 0
        self.expanded = 0
        self.evaluated = 0

    def add(self, evaluation: Evaluation) -> None:
        """Keeps an evaluation. Of layouts with equal options one is kept."""
        self.evaluations.setdefault(str(sorted(evaluation.options.items(), key=str)), evaluation)
        key = self._distribution(*evaluation.layout[:3])
        if key not in self.fastest or order(evaluation) < order(self.fastest[key]):
            self.fastest[key] = evaluation

    def _distribution(self, setting: int, split: Split, stages: Stages) -> Distribution:
        return self._space.settings[setting].base, split, stages

    def push(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._found += 1
            first = node.device_bytes if self.aim == "any" else node.seconds
            heapq.heappush(self.heap, (first, self._found, node))

    @property
    def fastest_seconds(self) -> float:
        """Seconds of the fastest layout that fits so far."""
        return min((each.iteration_seconds for each in self.evaluations.values()), default=inf)

    @property
    def least_seconds(self) -> float:
        """A lower bound of the time of all layouts that fit."""
        return min((node.seconds for _, _, node in self.heap), default=inf)

    @property
    def best(self) -> list[Evaluation]:
        """The fastest recomputation and overlaps of each distribution of layers, the fastest first.

        A setting without an effect, such as a sharded optimizer with one replica, is left out.
        """
        found: dict[tuple[object, ...], Evaluation] = {}
        for each in sorted(self.fastest.values(), key=order):
            layout = each.layout
            found.setdefault((layout.split, layout.stages, each.iteration_seconds, each.device_bytes), each)
        return list(found.values())

    @property
    def front(self) -> tuple[Evaluation, ...]:
        """The front of memory and time, up to `FRONT` times the time of the fastest."""
        return front_of(tuple(self.evaluations.values()), FRONT * self.fastest_seconds)

    def is_needed(self, node: Node, cutoffs: Cutoffs) -> bool:
        """Whether a node can improve the result."""
        if not cutoffs.needs(node.seconds, node.device_bytes):
            return False
        known = None if node.stages is None else self.fastest.get(self._distribution(node.setting, node.split, node.stages))
        if known is None or known.iteration_seconds >= node.seconds:
            return True
        return cutoffs._replace(best_seconds=0.0).needs(node.seconds, node.device_bytes)

    def cutoffs(self) -> Cutoffs:
        """What further layouts must be better than."""
        if self.aim != "table":
            return Cutoffs(min(self.fastest_seconds, self._most_seconds), 0.0, timed=self.aim != "any")
        best = self.best
        slowest = best[BEST - 1].iteration_seconds if len(best) >= BEST else inf
        front = tuple((each.iteration_seconds, each.device_bytes) for each in self.front)
        return Cutoffs(slowest, FRONT * front[0][0] if front else inf, front)

    def next_round(self, cutoffs: Cutoffs) -> list[list[Node]]:
        """The nodes of the next tasks, those with the lowest bounds."""
        tasks: list[list[Node]] = []
        cost = of_task = 0
        while self.heap and cost < ROUNDS[self.aim]:
            _, _, node = heapq.heappop(self.heap)
            if not self.is_needed(node, cutoffs):
                continue
            if not tasks or of_task >= TASK:
                tasks.append([])
                of_task = 0
            tasks[-1].append(node)
            more = COSTS["split" if node.stages is None else "distribution" if node.recompute is None else "layout"]
            cost, of_task = cost + more, of_task + more
            self.expanded += 1
            self.evaluated += node.recompute is not None
        return tasks

    def progress(self, cutoffs: Cutoffs) -> Progress:
        if self.aim == "table":
            left = sum(self.is_needed(node, cutoffs) for _, _, node in self.heap)
        else:  # as above, in a fraction of the time: a search without a front has many more nodes
            left = sum(node.seconds <= cutoffs.best_seconds for _, _, node in self.heap)
        return Progress(self.expanded, left, self.evaluated, self.fastest_seconds if self.evaluations else None)


def search_space(
    space: Space,
    workers: Workers,
    *,
    aim: Aim = "table",
    seconds: float = inf,
    progress: Callable[[Progress], None] | None = None,
    most_seconds: float = inf,
    enough: Callable[[Evaluation], bool] | None = None,
    advises: bool = True,
) -> SearchResult:
    """The result of a search. A KeyboardInterrupt, the loss of all workers, or `seconds` end it with what was found.

    With an aim other than "table" layouts that take longer than `most_seconds` are left out, and a layout that is `enough` ends the
    search. `advises`: whether the smallest change that fits is looked for.
    """
    started = time.monotonic()
    state = _State(space, aim, most_seconds)
    expand = partial(_expand, state, workers=workers, progress=progress, until=started + seconds, enough=enough)
    ended = ""
    with collector_paused():
        # first, so that workers get the space with what this has computed
        number = 0 if aim == "any" else space.candidates
        given = _given(space)
        try:
            if given is not None:
                state.add(given)
            state.push(root_nodes(space, timed=aim != "any"))
            sent = pickle.dumps(space)
            expand(sent)
            if aim != "any":
                tried = list(with_more_overlaps(space, [each.layout for each in state.best[:BEST]]))
                number += len(tried)
                state.push(tried)
                expand(sent)
        except KeyboardInterrupt:
            ended = INTERRUPTED
        except ClusterLostError as error:
            ended = str(error)
        except _OutOfTimeError:
            ended = f"{LIMIT} of {seconds:g} s"
        searched = advises and given is None and not ended and space.problem.runs and aim != "any"
        smallest = smallest_change(space) if searched else None
    return SearchResult(
        candidates=number,
        evaluated=state.evaluated,
        fitting=len(state.evaluations),
        seconds=time.monotonic() - started,
        best=tuple(state.best[:BEST]),
        front=state.front,
        given=given,
        smallest_change=smallest,
        error=ERROR_OF_ORDER,
        ended=ended,
        aim=aim,
        least_seconds=min(state.least_seconds, state.fastest_seconds) if ended else state.fastest_seconds,
    )


class _OutOfTimeError(Exception):
    """The time of a search is over."""


def _expand(
    state: _State,
    space: bytes,
    *,
    workers: Workers,
    progress: Callable[[Progress], None] | None,
    until: float,
    enough: Callable[[Evaluation], bool] | None,
) -> None:
    shown = 0.0
    ended = state.aim == "any" and bool(state.evaluations)
    while state.heap and not ended:
        if time.monotonic() > until:
            raise _OutOfTimeError
        cutoffs = state.cutoffs()
        tasks = state.next_round(cutoffs)
        for outcome in workers.run([Task(space, tuple(nodes), cutoffs) for nodes in tasks]):
            state.push(outcome.nodes)
            for evaluation in outcome.evaluations:
                state.add(evaluation)
                ended = ended or state.aim == "any" or (enough is not None and enough(evaluation))
        if progress is not None and time.monotonic() >= shown + BETWEEN_PROGRESS:
            shown = time.monotonic()
            progress(state.progress(state.cutoffs()))
    state.heap.clear()


def _given(space: Space) -> Evaluation | None:
    """The evaluation of the launch itself; None if it does not fit."""
    problem = space.problem
    if not problem.runs:
        return None
    try:
        return evaluate(space.given, {}, problem.given, problem.speed, problem.rates)
    except AnalyzerError:
        return None


def aim_of(space: Space, *, thorough: bool | None = None) -> Aim:
    """What to search for: all of the result if that is wanted, or by default (None) if it takes a few seconds."""
    if thorough is None:
        thorough = space.candidates < FEW
    return "table" if thorough else "fastest"
