"""The search of the explorer: the layouts of a launch with memory and time, each with the state that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from analyzer.api import problem_of
from analyzer.cli.explorer.state import Read, changed
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.executors import workers
from analyzer.layout_search.options import as_short_text
from analyzer.layout_search.search import search_space

SPACES: Final[Mapping[str, tuple[str, ...]]] = {"quick": ("tp", "pp", "vpp", "cp", "ep", "micro-batch"), "complete": ()}
"""The dimensions that a search changes; all usual ones if empty."""


def search_json(read: Read, *, over: Sequence[str], seconds: float) -> dict[str, Any]:
    """The fastest layouts of a launch that fit, and those with the best trade-off of memory and time.

    `over`: dimensions of a search. `seconds` limits the duration. Raises AnalyzerError.
    """
    with workers("1") as found:
        result = search_space(space_of(problem_of(read.launch), over=over), found, seconds=seconds)
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
        "change": changed(read, evaluation.options).changes_json(),
    }
