"""The search of the explorer: the layouts of a launch with memory and time, each with the state that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.api import problem_of
from analyzer.cli.explorer.state import Read, changed
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.executors import workers
from analyzer.layout_search.options import as_short_text
from analyzer.layout_search.search import Progress, aim_of, search_space


def search_json(read: Read, *, seconds: float, progress: Callable[[int, int, float | None], None] | None = None) -> dict[str, Any]:
    """The fastest layouts of a launch that fit, and those with the best trade-off of memory and time.

    `seconds` limits the duration. `progress` is called from time to time with the numbers of layouts that were expanded and that are
    open, and with the shortest iteration so far; a KeyboardInterrupt that it raises ends the search with what was found. Raises
    AnalyzerError.
    """

    def show(state: Progress) -> None:
        if progress is not None:
            progress(state.expanded, state.open, state.best_seconds)

    space = space_of(problem_of(read.launch))
    with workers("1") as found:
        result = search_space(space, found, aim=aim_of(space), seconds=seconds, progress=show)
    capacity = read.launch.job.hardware.capacity_bytes
    first = result.best[0].iteration_seconds if result.best else None
    points = [_point(read, each, equal=result.equals_first(each), best=each in result.best) for each in result]
    return {
        "points": [each for each in points if each["options"]],
        "candidates": result.candidates,
        "evaluated": result.evaluated,
        "seconds": result.seconds,
        "complete": result.complete,
        "gap": result.gap,
        "best_seconds": first,
        "capacity_bytes": capacity,
    }


def _point(read: Read, evaluation: Evaluation, *, equal: bool, best: bool) -> dict[str, Any]:
    return {
        "text": as_short_text(evaluation.options),
        "options": bool(evaluation.options),
        "iteration_seconds": evaluation.iteration_seconds,
        "device_bytes": evaluation.device_bytes,
        "tight": evaluation.tight,
        "equals_first": equal,
        "best": best,
        "state": changed(read, evaluation.options).as_json(),
    }
