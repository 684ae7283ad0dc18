"""The nodes of a search: splits, distributions of layers, and complete layouts, each with a lower bound of its time.

A split is expanded into its distributions of layers, a distribution into its layouts, one for each way to recompute activations,
and a layout is evaluated. A split with experts is first replaced by itself with a better bound. Every bound is at most that of what
the node is expanded into.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.bounds import BlockCache, Bounds, SplitFigures, least_device_bytes, least_seconds
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.floors import Floors
from analyzer.layout_search.overlaps import suits_layout
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.layout_search.split_jobs import (
    SplitJob,
    base_recompute,
    changed_options,
    job_of_layout,
    job_of_split,
    layout_changes,
    with_stages,
)
from analyzer.layout_search.state_floors import StateFloors
from analyzer.layout_search.variants import Variants
from analyzer.memory.screen import screen
from analyzer.specs import TrainingJob
from analyzer.specs.rules import first_violation

ROUNDING: Final = 1 - 1e-9
"""Sums in another order may differ in their last digits."""


COLLECTION: Final = 256
"""Layouts that are evaluated between two runs of the garbage collector."""


class Node(NamedTuple):
    """A node: a layout of which parts may still be open, with lower bounds of its time and memory."""

    seconds: float
    device_bytes: int
    setting: int
    split: Split
    stages: Stages | None = None
    recompute: Recompute | None = None
    counts_experts: bool = True
    """Of a split: whether the bound of the time has its experts and its exchange of tokens."""


class Cutoffs(NamedTuple):
    """What is known when nodes are expanded. Nodes that cannot improve the result are left out."""

    best_seconds: float
    """Most seconds of a layout among the best."""
    front_seconds: float
    """Most seconds of a layout on the front."""
    front: tuple[tuple[float, int], ...] = ()
    """Seconds and bytes of evaluated layouts, ordered by rising time and falling memory."""
    timed: bool = True
    """Whether the time of a layout matters. Otherwise nodes have no bound of it, which saves most of the work."""

    def needs(self, seconds: float, device_bytes: int) -> bool:
        """Whether a layout with at least so much time and memory can be among the best or on the front."""
        if seconds <= self.best_seconds:
            return True
        if seconds > self.front_seconds:
            return False
        place = bisect_left(self.front, (seconds, -1))  # the ones before it are faster
        return not place or self.front[place - 1][1] > device_bytes


def root_nodes(space: Space, *, timed: bool = True) -> Iterator[Node]:
    """A node for each split and setting that may fit. If not `timed`, without bounds of the time."""
    floors, states = [Floors(space, setting) for setting in range(len(space.settings))], StateFloors(space)
    counts_experts = not timed or space.problem.given.model.moe is None
    for split in space.splits():
        for setting in space.settings_of(split):
            device_bytes = states.of(setting, split)
            if device_bytes > space.problem.capacity:
                continue
            floor = floors[setting].of(split) if timed else 0.0
            if floor is not None:
                yield Node(floor, device_bytes, setting, split, counts_experts=counts_experts)


def with_more_overlaps(space: Space, layouts: Iterable[Layout]) -> Iterator[Node]:
    """Nodes of layouts with each setting that adds overlapped exchanges of tokens. Their time has no lower bound."""
    for layout in layouts:
        for index, setting in enumerate(space.settings):
            if setting.adds_to != layout.setting or not space.suits(setting.changes, layout.split):
                continue
            if suits_layout(setting.changes, layout.stages, layout.recompute):
                yield Node(0.0, 0, index, layout.split, layout.stages, layout.recompute)


def _no_figures(*_: int) -> BlockCache:
    return {}


class Expander:
    """Expands the nodes of a space in one process."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._attention = lru_cache(maxsize=64)(_no_figures)
        self._floors = lru_cache(maxsize=None)(partial(Floors, space))
        self._figures = lru_cache(maxsize=64)(self._split_figures)
        self._variants = lru_cache(maxsize=64)(self._split_variants)
        self._evaluated = 0

    def expand(self, node: Node, cutoffs: Cutoffs) -> Sequence[Node] | Evaluation | None:
        """The nodes of which `node` consists, those that `cutoffs` needs; for a complete layout its evaluation."""
        if node.recompute is not None:
            self._collect()
            return self._evaluation(node, cutoffs)
        if node.stages is not None:
            found = self._layouts(node, timed=cutoffs.timed)
        else:
            found = self._distributions(node, cutoffs) if node.counts_experts else self._with_experts(node)
        return [each for each in found if cutoffs.needs(each.seconds, each.device_bytes)]

    def _collect(self) -> None:
        """Frees module trees that caches have dropped, from time to time: their operations refer back to them."""
        self._evaluated += 1
        if self._evaluated % COLLECTION == 0:
            gc.collect()

    def _split_figures(self, setting: int, split: Split) -> tuple[SplitJob, SplitFigures] | None:
        found = job_of_split(self.space, setting, split)
        problem = self.space.problem
        if found is None:
            return None
        return found, SplitFigures(found.job, problem.speed, problem.rates, attention=self._of_attention(setting, split))

    def _with_experts(self, node: Node) -> Iterator[Node]:
        """A split with a better bound of its time."""
        seconds = self._floors(node.setting).with_experts(node.split, node.seconds)
        if seconds is not None:
            yield node._replace(seconds=seconds * ROUNDING, counts_experts=True)

    def _distributions(self, node: Node, cutoffs: Cutoffs) -> Iterator[Node]:
        """The distributions of layers of a split. Their memory is looked at first: its bound is cheap, and leaves out many."""
        found = self._figures(node.setting, node.split)
        if found is None:
            return
        of_split, of_base = found
        space, problem = self.space, self.space.problem
        figures = {of_split.job.flags: of_base}
        for stages in space.stages(node.split):
            changed = with_stages(space, node.setting, of_split.job, stages)
            if first_violation(changed) is not None:
                continue
            if changed.flags not in figures:
                figures[changed.flags] = SplitFigures(changed, problem.speed, problem.rates)
            least = least_device_bytes(changed, figures[changed.flags]) or 0
            if least > problem.capacity or not cutoffs.needs(node.seconds, least):
                continue
            seconds = least_seconds(changed, figures[changed.flags], problem.speed, problem.rates) if cutoffs.timed else None
            yield node._replace(seconds=node.seconds if seconds is None else seconds * ROUNDING, device_bytes=least, stages=stages)

    def _layouts(self, node: Node, *, timed: bool) -> Iterator[Node]:
        """The layouts of a distribution of layers."""
        space, stages = self.space, node.stages
        if stages is None:
            return
        layout = Layout(node.setting, node.split, stages, base_recompute(space))
        job = job_of_layout(space, layout)
        choices, base = space.recomputes(stages), Bounds(node.seconds, node.device_bytes)
        if job is None:
            found: Iterable[tuple[Recompute, Bounds]] = ((recompute, base) for recompute in choices)
        else:
            variants = self._variants(node.setting, node.split, self._typical_stages(node, stages, job))
            found = variants.bounds(job, choices, base, capacity=space.problem.capacity, timed=timed)
        for recompute, bound in found:
            seconds = max(node.seconds, bound.seconds * ROUNDING)
            yield node._replace(seconds=seconds, device_bytes=bound.device_bytes, recompute=recompute)

    def _typical_stages(self, node: Node, stages: Stages, job: TrainingJob) -> Stages:
        """A distribution of layers whose jobs have the modules of `job`: the first legal one, unless it excludes other options."""
        found = self._figures(node.setting, node.split)
        return found[0].stages if found is not None and found[0].job.flags == job.flags else stages

    def _split_variants(self, setting: int, split: Split, stages: Stages) -> Variants:
        problem, space = self.space.problem, self.space

        def build(recompute: Recompute) -> TrainingJob | None:
            return space.jobs.of(layout_changes(space, Layout(setting, split, stages, recompute)))

        return Variants(build, problem.speed, problem.rates, self._of_attention(setting, split))

    def _of_attention(self, setting: int, split: Split) -> BlockCache:
        """The figures of attention, which splits share that differ in their expert-parallel sizes."""
        return self._attention(setting, split.tensor, int(split.sequence), split.context, split.micro_batch)

    def _evaluation(self, node: Node, cutoffs: Cutoffs) -> Evaluation | None:
        """The evaluation of a layout, unless a better bound of its memory or its exact time leaves it out."""
        if node.stages is None or node.recompute is None or not cutoffs.needs(node.seconds, node.device_bytes):
            return None
        setting: int | None = node.setting
        while setting is not None:
            layout = Layout(setting, node.split, node.stages, node.recompute)
            found, fits = self._evaluated_layout(layout, node.seconds, cutoffs)
            if fits:
                return found
            setting = self.space.settings[setting].fallback
        return None

    def _evaluated_layout(self, layout: Layout, seconds: float, cutoffs: Cutoffs) -> tuple[Evaluation | None, bool]:
        """The evaluation of a layout, if it is needed, and whether the layout fits as far as is known.

        `seconds`: a lower bound of its time.
        """
        problem = self.space.problem
        job = job_of_layout(self.space, layout)
        needed = True

        def is_needed(exact: float) -> bool:
            nonlocal needed
            needed = cutoffs.needs(exact, least)
            return needed

        try:
            if job is None or (least := screen(job).device_bytes) > problem.capacity:
                return None, False
            if not cutoffs.needs(seconds, least):
                return None, True
            options = changed_options(self.space, layout)
            found = evaluate(layout, options, job, problem.speed, problem.rates, is_needed=is_needed)
        except AnalyzerError:
            return None, False
        return found, found is not None or not needed
