"""All layouts of a small space, each evaluated exactly, and the result that they give by the definitions of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.options import by_flag
from analyzer.layout_search.space import Layout
from analyzer.layout_search.split_jobs import job_of_layout, layout_changes
from analyzer.specs import TrainingJob
from tests.layout_search.random_spaces import Case, case_of

UNLIMITED: Final = 1 << 60
"""Memory of a GPU on which every layout fits, in bytes."""


class Exact(NamedTuple):
    """A layout that Megatron accepts, with its exact memory and time."""

    layout: Layout
    changes: dict[str, object]
    job: TrainingJob
    evaluation: Evaluation


class Every(NamedTuple):
    """A space, and all layouts of it that Megatron accepts."""

    case: Case
    space: Space
    layouts: tuple[Exact, ...]

    @property
    def fitting(self) -> list[Evaluation]:
        """The layouts that fit the GPU, some of them because the allocator returns unused segments when the memory is full."""
        problem = self.space.problem
        found = []
        for each in self.layouts:
            options = by_flag(each.changes, problem.arguments)
            fits = evaluate(each.layout, options, each.job, problem.speed, problem.rates)
            if fits is not None:
                found.append(fits)
        return found


def every_layout(name: int | str) -> Every:
    """All layouts of a case that Megatron accepts, with those that do not fit."""
    case = case_of(name)
    space = case.space
    return Every(case, space, tuple(found for layout in layouts_of(space) if (found := exact(space, layout)) is not None))


def layouts_of(space: Space) -> Iterator[Layout]:
    """All layouts whose sizes divide the world and the batch."""
    for setting in range(len(space.settings)):
        for split in space.splits():
            for stages in space.stages(split):
                for recompute in space.recomputes(stages):
                    yield Layout(setting, split, stages, recompute)


def exact(space: Space, layout: Layout) -> Exact | None:
    """The exact memory and time of a layout, on a GPU with enough memory; None if Megatron refuses it."""
    problem = space.problem
    job = job_of_layout(space, layout)
    if job is None:
        return None
    changes = layout_changes(space, layout)
    large = replace(job, hardware=replace(job.hardware, capacity_bytes=UNLIMITED))
    try:
        found = evaluate(layout, by_flag(changes, problem.arguments), large, problem.speed, problem.rates)
    except AnalyzerError:
        return None
    assert found is not None
    return Exact(layout, changes, job, found)


Figures = tuple[float, int]
"""Seconds of an iteration, and bytes of the highest-memory rank."""


def figures(evaluation: Evaluation) -> Figures:
    """Time and memory of a layout."""
    return evaluation.iteration_seconds, evaluation.device_bytes


def expected_best(fitting: Sequence[Evaluation], *, most: int) -> list[Figures]:
    """The fastest layouts, where those that differ only in recomputation, or in a setting without effect, share a place.

    Of equally fast ones, the smallest.
    """
    groups: dict[tuple[object, ...], Figures] = {}
    for each in fitting:
        key = (each.layout.setting, each.layout.split, each.layout.stages)
        groups[key] = min(figures(each), groups.get(key, (inf, 0)))
    distinct = {(split, stages, found) for (_, split, stages), found in groups.items()}
    return sorted(found for _, _, found in distinct)[:most]


def expected_front(fitting: Sequence[Evaluation], *, share: float) -> list[Figures]:
    """The layouts for which no other is as fast and as small, up to `share` times the time of the fastest."""
    points = {figures(each) for each in fitting}
    limit = share * min(points, default=(inf, 0))[0]
    return sorted(
        (seconds, size)
        for seconds, size in points
        if seconds <= limit and not any(other != (seconds, size) and other[0] <= seconds and other[1] <= size for other in points)
    )


def expected_place(given: Evaluation | None, best: Sequence[Figures]) -> int | None:
    """The place of the launch: one more than the listed layouts that are faster. None if it does not fit, or if all are."""
    if given is None:
        return None
    place = 1 + sum(seconds < given.iteration_seconds for seconds, _ in best)
    return place if place <= len(best) else None
