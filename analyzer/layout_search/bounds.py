"""Lower bounds of the time and the memory of a layout, from integers and from figures of the modules of a layer.

Modules depend on the split and on recomputation, not on the number of stages. So their figures are computed once for all
distributions of layers over the pipeline.

The bound of the time leaves out messages between pipeline stages and data-parallel communication, and the bound of the memory has
model states only. `analyzer.memory.screen` has a much better bound of the memory, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from analyzer.memory.device_overhead import outside_allocator_bytes
from analyzer.memory.screen import kinds_of_stages, least_state_bytes, parameter_figures
from analyzer.modules.inputs import module_inputs
from analyzer.modules.kinds import ATTENTION_BRANCH, ModuleKind
from analyzer.modules.layer import ModuleRuns
from analyzer.modules.models.gpt import chunk_modules
from analyzer.modules.models.parts import ONE_BLOCK, ChunkKind
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.optimizer_seconds import seconds_of_parameters
from analyzer.time.pass_seconds import Run, pair_seconds, pass_run, sum_of_runs
from analyzer.time.pass_work import block_work, context_of, is_sum_of_children, settings_of
from analyzer.time.pipeline import is_large, schedule_of
from analyzer.time.work.context import work_context


class ChunkFigures(NamedTuple):
    """Figures of a model chunk."""

    forward: float
    """Seconds of the forward of a microbatch."""
    backward: float
    dense: int
    """Elements of all parameters except those of experts."""
    experts: int
    parameter_bytes: int


class _BlockFigures(NamedTuple):
    forward: Run
    backward: Run
    dense: int
    experts: int
    parameter_bytes: int


BlockCache = dict[int, tuple[Module, _BlockFigures]]
"""Figures by the id of their module, which the entry keeps."""


class SplitFigures:
    """The figures of the chunks of jobs that differ only in their stages, batch and world."""

    def __init__(
        self,
        job: TrainingJob,
        speed: SpeedSpec,
        rates: Efficiencies,
        *,
        blocks: BlockCache | None = None,
        attention: BlockCache | None = None,
    ) -> None:
        """`blocks`: figures that jobs share which differ only in recomputation, stages, batch and world. `attention`: those of
        the attention branch, which jobs share that differ in expert parallelism too."""
        self._job, self._speed, self._rates = job, speed, rates
        self._context, self._settings = work_context(job), settings_of(job)
        self._blocks: BlockCache = {} if blocks is None else blocks
        self._attention: BlockCache = {} if attention is None else attention
        self._chunks: dict[ChunkKind, ChunkFigures | None] = {}
        self._retained: dict[ChunkKind, int] = {}
        self._lists: dict[ChunkKind, ModuleRuns | None] = {}

    def chunk(self, kind: ChunkKind) -> ChunkFigures | None:
        """The figures of a chunk; None if it has no modules."""
        if kind not in self._chunks:
            self._chunks[kind] = self._chunk(kind)
        return self._chunks[kind]

    def retained(self, kind: ChunkKind) -> int:
        """Bytes that a microbatch keeps in a chunk between its forward and its backward."""
        if kind not in self._retained:
            modules = self._modules(kind) or ()
            self._retained[kind] = sum(times * module.retained_bytes for module, times in modules)
        return self._retained[kind]

    def _chunk(self, kind: ChunkKind) -> ChunkFigures | None:
        modules = self._modules(kind)
        if modules is None:
            return None
        found = [(self._block(module), times) for module, times in modules]
        forward = sum_of_runs([(each.forward, times) for each, times in found])
        backward = sum_of_runs([(each.backward, times) for each, times in found])
        first, second = pair_seconds(forward, backward, self._rates)
        return ChunkFigures(
            forward=first.total,
            backward=second.total,
            dense=sum(times * each.dense for each, times in found),
            experts=sum(times * each.experts for each, times in found),
            parameter_bytes=sum(times * each.parameter_bytes for each, times in found),
        )

    def _modules(self, kind: ChunkKind) -> ModuleRuns | None:
        """The modules of a chunk with their number. Without full recompute, chunks with the same kinds of layers have the same."""
        inputs = module_inputs(self._job)
        model = inputs.model
        differ = model.family not in ONE_BLOCK or model.adapters is not None  # the first layer may differ from equal ones
        if inputs.recompute.granularity == "full" or not kind.layers or differ:
            return chunk_modules(inputs, kind)
        one_each = replace(kind, layers=tuple((layer, 1) for layer, _ in kind.layers))
        if one_each not in self._lists:
            self._lists[one_each] = chunk_modules(inputs, one_each)
        modules, numbers = self._lists[one_each], iter(kind.layers)
        if modules is None:
            return None
        return tuple((module, next(numbers)[1] if module.kind is ModuleKind.LAYER else times) for module, times in modules)

    def _block(self, module: Module) -> _BlockFigures:
        cache = self._attention if module.kind in ATTENTION_BRANCH else self._blocks
        if id(module) not in cache:
            runs = self._runs_of_children(module) if is_sum_of_children(module, self._settings) else self._runs(module)
            cache[id(module)] = (module, _BlockFigures(*runs, *module.derived(parameter_figures)))
            module.forget()  # its operations are not needed again, and caches keep many modules
        return cache[id(module)][1]

    def _runs_of_children(self, module: Module) -> tuple[Run, Run]:
        children = [self._block(child) for child in module.children]
        return sum_of_runs([(each.forward, 1) for each in children]), sum_of_runs([(each.backward, 1) for each in children])

    def _runs(self, module: Module) -> tuple[Run, Run]:
        context = context_of(module, self._context)
        forward, backward = (
            pass_run(self._job, module.derived(block_work, direction, context, self._settings), self._speed, self._rates)
            for direction in ("forward", "backward")
        )
        return forward, backward


class Plan(NamedTuple):
    """The chunks of the pipeline ranks, as indices of distinct kinds."""

    kinds: tuple[ChunkKind, ...]
    ranks: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    """The first of the pipeline ranks with equal chunks: later ones have no more microbatches in flight."""


def plan_of(job: TrainingJob) -> Plan:
    """The chunks of a job."""
    return _plan(kinds_of_stages(job), job.parallel.pipeline)


@lru_cache(maxsize=4096)
def _plan(kinds: tuple[ChunkKind, ...], pipeline: int) -> Plan:
    known: dict[ChunkKind, int] = {}
    places = [known.setdefault(kind, len(known)) for kind in kinds]
    ranks = tuple(tuple(places[rank::pipeline]) for rank in range(pipeline))
    return Plan(tuple(known), ranks, tuple({each: rank for rank, each in reversed(tuple(enumerate(ranks)))}.values()))


class Bounds(NamedTuple):
    """Lower bounds of a layout."""

    seconds: float
    """Of an iteration."""
    device_bytes: int
    """Of the highest-memory rank."""


def bounds(job: TrainingJob, figures: SplitFigures, speed: SpeedSpec, rates: Efficiencies) -> Bounds | None:
    """The bounds of a job whose modules are those of `figures`; None if a chunk has no modules."""
    plan = plan_of(job)
    chunks = [figures.chunk(kind) for kind in plan.kinds]
    if any(chunk is None for chunk in chunks):
        return None
    found = [chunk for chunk in chunks if chunk is not None]
    seconds = _passes(job, plan, [chunk.forward + chunk.backward for chunk in found]) + rates.iteration
    states, step = 0, 0.0
    for places in set(plan.ranks):
        of_rank = [found[place] for place in places]
        dense, experts = sum(chunk.dense for chunk in of_rank), sum(chunk.experts for chunk in of_rank)
        step = max(step, seconds_of_parameters(job, dense, experts, speed, rates))
        size = sum(chunk.parameter_bytes for chunk in of_rank)
        states = max(states, least_state_bytes(job, dense=dense, experts=experts, parameter_bytes=size))
    return Bounds(seconds + step, states + outside_allocator_bytes(job))


def _passes(job: TrainingJob, plan: Plan, seconds: Sequence[float]) -> float:
    """Seconds until the last pass has ended, without messages: a rank runs all microbatches, after a first one has reached it.

    `seconds`: forward and backward of each kind of chunk.
    """
    each = [sum(seconds[place] for place in places) for places in plan.ranks]
    microbatches, schedule = job.batch.microbatches, schedule_of(job)
    if is_large(schedule):
        return microbatches * max(each) + (sum(each) - max(each)) / schedule.chunks
    before = accumulate((seconds[places[0]] for places in plan.ranks), initial=0.0)
    return max(microbatches * own + reached for own, reached in zip(each, before, strict=False))
