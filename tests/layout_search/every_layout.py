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
from analyzer.layout_search.result import order
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
    """A space, and all layouts of it that Megatron accepts, with every setting."""

    case: Case
    space: Space
    layouts: tuple[Exact, ...]

    @property
    def searched(self) -> list[Exact]:
        """The layouts that a search looks at from the start."""
        space = self.space
        return [each for each in self.layouts if each.layout.setting in space.settings_of(each.layout.split)]

    def fitting(self, *, most: int) -> list[Evaluation]:
        """The layouts of a search that fit the GPU: the launch, and each layout with its overlaps and fusions, or with fewer of
        them if it fits only so.

        The overlapped exchange of tokens is among them for the `most` fastest distributions of layers.
        """
        space = self.space
        known = {each.layout: each for each in self.layouts}
        found: dict[Layout, Evaluation] = {}
        for layout in known:
            setting = space.settings[layout.setting]
            searched = layout.setting in space.settings_of(layout.split)
            if not searched and layout != space.given:
                continue
            fits = self._fitting(known[layout])
            while fits is None and setting.fallback is not None:
                other = known.get(layout._replace(setting=setting.fallback))
                fits = None if other is None else self._fitting(other)
                setting = space.settings[setting.fallback]
            if fits is not None:
                found[fits.layout] = fits
        for first in best_of(space, list(found.values()))[:most]:
            for index, setting in enumerate(space.settings):
                tried = known.get(first.layout._replace(setting=index))
                if setting.adds_to == first.layout.setting and tried is not None:
                    fits = self._fitting(tried)
                    if fits is not None:
                        found[fits.layout] = fits
        return list(found.values())

    def _fitting(self, each: Exact) -> Evaluation | None:
        problem = self.space.problem
        options = by_flag(each.changes, problem.arguments)
        return evaluate(each.layout, options, each.job, problem.speed, problem.rates)


def every_layout(name: int | str) -> Every:
    """All layouts of a case that Megatron accepts, with those that do not fit."""
    case = case_of(name)
    space = case.space
    return Every(case, space, tuple(found for layout in layouts_of(space) if (found := exact(space, layout)) is not None))


def layouts_of(space: Space) -> Iterator[Layout]:
    """All layouts whose sizes divide the world and the batch."""
    for setting in range(len(space.settings)):
        for split in space.splits():
            if not space.suits(space.settings[setting].changes, split):
                continue
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


def expected_best(space: Space, fitting: Sequence[Evaluation], *, most: int) -> list[Figures]:
    """The fastest layouts, where those that differ only in recomputation, overlaps or a setting without effect share a place.

    Of equally fast ones, the smallest.
    """
    return [figures(each) for each in best_of(space, fitting)[:most]]


def best_of(space: Space, fitting: Sequence[Evaluation]) -> list[Evaluation]:
    """The fastest layout of each distribution of layers."""
    groups: dict[tuple[object, ...], Evaluation] = {}
    for each in sorted(fitting, key=order):
        groups.setdefault((space.settings[each.layout.setting].base, each.layout.split, each.layout.stages), each)
    distinct: dict[tuple[object, ...], Evaluation] = {}
    for (_, split, stages), each in groups.items():
        distinct.setdefault((split, stages, figures(each)), each)
    return list(distinct.values())


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
