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


class ChunkSeconds(NamedTuple):
    """Seconds of a microbatch in a model chunk."""

    forward: float
    backward: float


class ChunkParameters(NamedTuple):
    """The parameters of a model chunk."""

    dense: int
    """Elements of all parameters except those of experts."""
    experts: int
    parameter_bytes: int


BlockCache = dict[int, tuple[Module, tuple[Run, Run]]]
"""Forward and backward by the id of their module, which the entry keeps."""


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
        self._seconds: dict[ChunkKind, ChunkSeconds | None] = {}
        self._parameters: dict[ChunkKind, ChunkParameters | None] = {}
        self._retained: dict[ChunkKind, int] = {}
        self._lists: dict[ChunkKind, ModuleRuns | None] = {}

    def seconds(self, kind: ChunkKind) -> ChunkSeconds | None:
        """The seconds of a microbatch in a chunk; None if it has no modules."""
        if kind not in self._seconds:
            modules = self._modules(kind)
            self._seconds[kind] = None if modules is None else self._seconds_of(modules)
        return self._seconds[kind]

    def parameters(self, kind: ChunkKind) -> ChunkParameters | None:
        """The parameters of a chunk; None if it has no modules."""
        if kind not in self._parameters:
            modules = self._modules(kind)
            self._parameters[kind] = None if modules is None else parameters_of(modules)
        return self._parameters[kind]

    def retained(self, kind: ChunkKind) -> int:
        """Bytes that a microbatch keeps in a chunk between its forward and its backward."""
        if kind not in self._retained:
            modules = self._modules(kind) or ()
            self._retained[kind] = sum(times * module.retained_bytes for module, times in modules)
        return self._retained[kind]

    def _seconds_of(self, modules: ModuleRuns) -> ChunkSeconds:
        found = [(self._block(module), times) for module, times in modules]
        forward = sum_of_runs([(each, times) for (each, _), times in found])
        backward = sum_of_runs([(each, times) for (_, each), times in found])
        first, second = pair_seconds(forward, backward, self._rates)
        return ChunkSeconds(first.total, second.total)

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

    def _block(self, module: Module) -> tuple[Run, Run]:
        cache = self._attention if module.kind in ATTENTION_BRANCH else self._blocks
        if id(module) not in cache:
            runs = self._runs_of_children(module) if is_sum_of_children(module, self._settings) else self._runs(module)
            cache[id(module)] = (module, runs)
            module.forget()  # its operations are not needed again, and caches keep many modules
        return cache[id(module)][1]

    def _runs_of_children(self, module: Module) -> tuple[Run, Run]:
        children = [self._block(child) for child in module.children]
        return sum_of_runs([(forward, 1) for forward, _ in children]), sum_of_runs([(backward, 1) for _, backward in children])

    def _runs(self, module: Module) -> tuple[Run, Run]:
        context = context_of(module, self._context)
        forward, backward = (
            pass_run(self._job, module.derived(block_work, direction, context, self._settings), self._speed, self._rates)
            for direction in ("forward", "backward")
        )
        return forward, backward


def parameters_of(modules: ModuleRuns) -> ChunkParameters:
    """The parameters of modules with their number."""
    found = [(times, *module.derived(parameter_figures)) for module, times in modules]
    return ChunkParameters(
        dense=sum(times * dense for times, dense, _, _ in found),
        experts=sum(times * experts for times, _, experts, _ in found),
        parameter_bytes=sum(times * size for times, _, _, size in found),
    )


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
    seconds, device_bytes = least_seconds(job, figures, speed, rates), least_device_bytes(job, figures)
    return None if seconds is None or device_bytes is None else Bounds(seconds, device_bytes)


def least_seconds(job: TrainingJob, figures: SplitFigures, speed: SpeedSpec, rates: Efficiencies) -> float | None:
    """The bound of the time; None if a chunk has no modules."""
    plan = plan_of(job)
    found = [seconds for kind in plan.kinds if (seconds := figures.seconds(kind)) is not None]
    ranks = _ranks(plan, figures)
    if ranks is None or len(found) < len(plan.kinds):
        return None
    step = max(seconds_of_parameters(job, each.dense, each.experts, speed, rates) for each in ranks)
    return _passes(job, plan, [each.forward + each.backward for each in found]) + rates.iteration + step


def least_device_bytes(job: TrainingJob, figures: SplitFigures) -> int | None:
    """The bound of the memory; None if a chunk has no modules."""
    ranks = _ranks(plan_of(job), figures)
    if ranks is None:
        return None
    return max(least_state_bytes(job, **each._asdict()) for each in ranks) + outside_allocator_bytes(job)


def _ranks(plan: Plan, figures: SplitFigures) -> list[ChunkParameters] | None:
    """The parameters of the distinct pipeline ranks; None if a chunk has no modules."""
    found = [parameters for kind in plan.kinds if (parameters := figures.parameters(kind)) is not None]
    if len(found) < len(plan.kinds):
        return None
    return [parameters_of_rank([found[place] for place in places]) for places in dict.fromkeys(plan.ranks)]


def parameters_of_rank(chunks: Sequence[ChunkParameters]) -> ChunkParameters:
    """The parameters of all chunks of a rank."""
    return ChunkParameters(*(sum(values) for values in zip(*chunks, strict=True)))


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
