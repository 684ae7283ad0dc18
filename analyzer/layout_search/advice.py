"""Advice for a launch that does not fit: changes of one dimension of its layout with which it does, or else of two.

The changes are layouts of the search of the launch, so that they keep its model, number of GPUs and global batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.options import as_text
from analyzer.layout_search.problem import Problem
from analyzer.layout_search.result import ERROR_OF_ORDER, order
from analyzer.layout_search.smallest_change import Changed, Values, changed_layouts, fastest, fits_states, other_values
from analyzer.layout_search.split_jobs import changed_options
from analyzer.memory.collector import collector_paused
from analyzer.memory.ranks import rank_classes
from analyzer.memory.screen import is_screened
from analyzer.memory.verdict import highest
from analyzer.results import Advice
from analyzer.specs import TrainingJob

MOST: Final = 5
"""Listed changes."""
INSUFFICIENT: Final = 3
"""Listed changes if none is enough."""
LEAST_SAVING: Final = 0.01
"""Share of the memory that a change saves at least to be listed though it is not enough."""
OF_SLOW: Final = 3
"""Values of a dimension that are tried for jobs whose memory has no fast lower bound, and no pairs: each takes some 0.1 s."""


def advise(problem: Problem, *, before: int, timed: bool, keep: Sequence[str] = ()) -> tuple[Advice, ...]:
    """Changes of options that make the launch of `problem` fit, those with the shortest iterations first.

    For each dimension of the layout the fastest change that fits is listed. If no change of one dimension is enough, pairs of some
    values are; if these are not enough either, the changes that save the most memory, with `fits` False. A search tries all pairs.
    `before`: bytes of the highest-memory rank. `timed`: whether the speeds in `problem` are those of the GPU; if not, they give the
    order only. `keep`: options that must not change (`--info-keep`).
    """
    with collector_paused():
        try:
            space = space_of(problem, keep=keep)
        except AnalyzerError:  # a launch that a search does not support
            return ()
        values, slow = other_values(space), not is_screened(problem.given)
        if slow:
            values = {name: _spread(each, OF_SLOW) for name, each in values.items()}
        may_fit = fits_states(space)
        found = fastest(space, changed_layouts(space, values, 1, may_fit))
        singles = [] if found else list(changed_layouts(space, values, 1))
        if not found and not slow:
            found = fastest(space, changed_layouts(space, _of_pairs(singles, values), 2, may_fit))
        if found:
            return tuple(_advice(each, before, timed=timed) for each in sorted(found.values(), key=order)[:MOST])
        return _insufficient(space, singles, before)


def faster(problem: Problem, *, before: int, seconds: float, keep: Sequence[str] = ()) -> tuple[Advice, ...]:
    """Changes of one dimension that make a launch that fits faster, the fastest first; of each dimension the fastest.

    `before`: bytes of the highest-memory rank. `seconds`: those of an iteration of the launch. Changes within the error of the
    times are left out. `keep`: options that must not change. A search also changes several dimensions together.
    """
    with collector_paused():
        try:
            space = space_of(problem, keep=keep)
        except AnalyzerError:  # a launch that a search does not support
            return ()
        if not is_screened(problem.given):  # each layout takes some 0.1 s
            return ()
        settings = [index for index, setting in enumerate(space.settings) if index and setting.base == 0 and setting.searched]
        values = {**other_values(space), "setting": settings}
        found = fastest(space, changed_layouts(space, values, 1), within=(1 - ERROR_OF_ORDER) * seconds)
        return tuple(_advice(each, before, timed=True) for each in sorted(found.values(), key=order)[:MOST])


def _spread(values: Sequence[object], count: int) -> Sequence[object]:
    """At most `count` of the values, evenly spread and with the last one."""
    if len(values) <= count:
        return values
    return [values[(index + 1) * len(values) // count - 1] for index in range(count)]


def _of_pairs(singles: list[Changed], values: Values) -> Values:
    """For each dimension the value with the least memory and the one in the middle between it and the launch."""
    found: dict[str, Sequence[object]] = {}
    for name in values:
        ordered = sorted((each for each in singles if each.names == (name,)), key=lambda each: each.least_bytes)
        found[name] = [each.values[0] for each in (*ordered[:1], *ordered[len(ordered) // 2 :][:1])]
    return found


def _advice(evaluation: Evaluation, before: int, *, timed: bool) -> Advice:
    return Advice(
        change=as_text(evaluation.options),
        device_bytes=evaluation.device_bytes,
        saves_bytes=before - evaluation.device_bytes,
        fits=True,
        iteration_seconds=evaluation.iteration_seconds if timed else None,
    )


def _reported_bytes(job: TrainingJob) -> int:
    """Device memory of the highest-memory rank in a report of the job."""
    return highest(rank_classes(job)).memory.device_bytes


def _insufficient(space: Space, singles: list[Changed], before: int) -> tuple[Advice, ...]:
    """The change of each dimension that saves the most memory, of the dimensions that save the most."""
    found: dict[tuple[str, ...], Advice] = {}
    for each in sorted(singles, key=lambda each: each.least_bytes):
        if each.names in found or len(found) == INSUFFICIENT:
            continue
        try:
            size = _reported_bytes(each.job)
        except AnalyzerError:
            continue
        options = changed_options(space, each.layout)
        if options and before - size >= LEAST_SAVING * before:
            found[each.names] = Advice(change=as_text(options), device_bytes=size, saves_bytes=before - size, fits=False)
    return tuple(sorted(found.values(), key=lambda advice: advice.device_bytes))
