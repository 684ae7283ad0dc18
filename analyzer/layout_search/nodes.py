"""The nodes of a search: splits, distributions of layers, and complete layouts, each with a lower bound of its time.

A split is expanded into its distributions of layers, a distribution into its layouts, one for each way to recompute activations,
and a layout is evaluated exactly. Every bound is at most that of what the node is expanded into.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.bounds import BlockCache, Bounds, SplitFigures, bounds
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.floors import Floors
from analyzer.layout_search.options import by_flag
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.layout_search.split_jobs import SplitJob, base_recompute, job_of_layout, job_of_split, layout_changes, with_stages
from analyzer.layout_search.variants import Variants
from analyzer.memory.screen import screen
from analyzer.specs import TrainingJob
from analyzer.specs.rules import first_violation

ROUNDING: Final = 1 - 1e-9
"""Sums in another order may differ in their last digits."""


class Node(NamedTuple):
    """A node: a layout of which parts may still be open, with lower bounds of its time and memory."""

    seconds: float
    device_bytes: int
    setting: int
    split: Split
    stages: Stages | None = None
    recompute: Recompute | None = None


class Cutoffs(NamedTuple):
    """What is known when nodes are expanded. Nodes that cannot improve the result are left out."""

    best_seconds: float
    """Most seconds of a layout among the best."""
    front_seconds: float
    """Most seconds of a layout on the front."""
    front: tuple[tuple[float, int], ...] = ()
    """Seconds and bytes of evaluated layouts, ordered by rising time and falling memory."""

    def needs(self, seconds: float, device_bytes: int) -> bool:
        """Whether a layout with at least so much time and memory can be among the best or on the front."""
        if seconds <= self.best_seconds:
            return True
        if seconds > self.front_seconds:
            return False
        place = bisect_left(self.front, (seconds, -1))  # the ones before it are faster
        return not place or self.front[place - 1][1] > device_bytes


def root_nodes(space: Space) -> Iterator[Node]:
    """A node for each split and setting."""
    for setting in range(len(space.settings)):
        floors = Floors(space, setting)
        for split in space.splits():
            floor = floors.of(split)
            if floor is not None:
                yield Node(floor, 0, setting, split)


class Expander:
    """Expands the nodes of a space in one process."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._attention: dict[tuple[int, ...], BlockCache] = {}
        self._figures = lru_cache(maxsize=64)(self._split_figures)
        self._variants = lru_cache(maxsize=32)(self._split_variants)

    def expand(self, node: Node, cutoffs: Cutoffs) -> Sequence[Node] | Evaluation | None:
        """The nodes of which `node` consists, those that `cutoffs` needs; for a complete layout its evaluation."""
        if node.stages is None:
            return [each for each in self._distributions(node) if cutoffs.needs(each.seconds, each.device_bytes)]
        if node.recompute is None:
            return list(self._layouts(node, cutoffs))
        return self._evaluation(node, cutoffs)

    def _split_figures(self, setting: int, split: Split) -> tuple[SplitJob, SplitFigures] | None:
        found = job_of_split(self.space, setting, split)
        problem = self.space.problem
        if found is None:
            return None
        return found, SplitFigures(found.job, problem.speed, problem.rates, attention=self._of_attention(setting, split))

    def _distributions(self, node: Node) -> Iterator[Node]:
        found = self._figures(node.setting, node.split)
        if found is None:
            return
        of_split, figures = found
        space = self.space
        for stages in space.stages(node.split):
            changed = with_stages(space, of_split.job, stages)
            if first_violation(changed) is not None:
                continue
            bound = bounds(changed, figures, space.problem.speed, space.problem.rates)
            if bound is None:
                bound = Bounds(node.seconds, 0)
            if bound.device_bytes <= space.problem.capacity:
                yield node._replace(seconds=bound.seconds * ROUNDING, device_bytes=bound.device_bytes, stages=stages)

    def _layouts(self, node: Node, cutoffs: Cutoffs) -> Iterator[Node]:
        """The layouts of a distribution of layers: those whose cheap bounds pass, with better bounds."""
        space, stages = self.space, node.stages
        if stages is None:
            return
        layout = Layout(node.setting, node.split, stages, base_recompute(space))
        job = job_of_layout(space, layout)
        choices = tuple(space.recomputes(stages))
        if job is not None:
            base = Bounds(node.seconds, node.device_bytes)
            cheap = self._variants(node.setting, node.split).bounds(job, choices, base)
        else:
            cheap = [(recompute, Bounds(node.seconds, node.device_bytes)) for recompute in choices]
        for recompute, bound in cheap:
            if bound.device_bytes > space.problem.capacity or not cutoffs.needs(bound.seconds * ROUNDING, bound.device_bytes):
                continue
            changed = job_of_layout(space, layout._replace(recompute=recompute))
            if changed is None:
                continue
            bound = self._layout_bounds(changed)
            if bound.device_bytes > space.problem.capacity:
                continue
            complete = node._replace(
                seconds=max(node.seconds, bound.seconds * ROUNDING), device_bytes=bound.device_bytes, recompute=recompute
            )
            if cutoffs.needs(complete.seconds, complete.device_bytes):
                yield complete

    def _split_variants(self, setting: int, split: Split) -> Variants:
        problem, space = self.space.problem, self.space
        found = job_of_split(space, setting, split)

        def build(recompute: Recompute) -> TrainingJob:
            if found is None:
                raise AnalyzerError("no distribution of layers is legal")
            return problem.job(layout_changes(space, Layout(setting, split, found.stages, recompute)))

        return Variants(build, problem.speed, problem.rates, self._of_attention(setting, split))

    def _of_attention(self, setting: int, split: Split) -> BlockCache:
        """The figures of attention, which splits share that differ in their expert-parallel sizes."""
        return self._attention.setdefault((setting, split.tensor, split.context, split.micro_batch), {})

    def _layout_bounds(self, job: TrainingJob) -> Bounds:
        problem = self.space.problem
        memory = screen(job).device_bytes
        if memory > problem.capacity:
            return Bounds(0.0, memory)
        found = bounds(job, SplitFigures(job, problem.speed, problem.rates), problem.speed, problem.rates)
        return Bounds(0.0 if found is None else found.seconds, memory)

    def _evaluation(self, node: Node, cutoffs: Cutoffs) -> Evaluation | None:
        if node.stages is None or node.recompute is None or not cutoffs.needs(node.seconds, node.device_bytes):
            return None
        problem = self.space.problem
        layout = Layout(node.setting, node.split, node.stages, node.recompute)
        changes = layout_changes(self.space, layout)
        most = max(cutoffs.best_seconds, cutoffs.front_seconds)
        try:
            job = problem.job(changes)
            return evaluate(layout, by_flag(changes, problem.arguments), job, problem.speed, problem.rates, most_seconds=most)
        except AnalyzerError:
            return None
