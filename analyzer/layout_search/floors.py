"""Lower bounds of the time of all layouts with a split, without a look at each split's modules.

Only the experts and the exchange of tokens depend on the expert-parallel sizes. So the time of all other modules is computed once
for splits that differ in these sizes only. That of the experts and of the exchange depends on these sizes and on the tokens of a
rank, and is computed once for splits with as many tokens. A first bound has the FLOPs of the experts at the highest efficiency
instead, and no exchange: it leaves out splits of which nothing else has to be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.space import Split
from analyzer.layout_search.split_jobs import job_of_split
from analyzer.modules.inputs import module_inputs, one_projection_in_userbuffers
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerRuns, ModuleRuns
from analyzer.modules.models.gpt import chunk_modules, layer_kinds
from analyzer.modules.models.parts import ChunkKind
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.time.kernels.seconds import least_gemm_seconds
from analyzer.time.pass_seconds import pass_run
from analyzer.time.pass_work import PassWork, block_work, settings_of
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Gemm

EXCHANGE: Final = frozenset({ModuleKind.DISPATCH, ModuleKind.EXPERTS, ModuleKind.COMBINE})
"""Modules whose time depends on the expert-parallel sizes."""
ROUNDING: Final = 0.98
"""Tokens are rounded when they are distributed over experts."""


class Floors:
    """The bounds of the splits of a space, for one setting."""

    def __init__(self, space: Space, setting: int) -> None:
        self._space, self._setting = space, setting
        self._models: dict[tuple[int, ...], float] = {}
        self._experts: dict[tuple[float, ...], float] = {}

    def of(self, split: Split) -> float | None:
        """Seconds of an iteration if all stages have equal work; None if Megatron refuses every layout with the split."""
        key = (split.tensor, split.sequence, split.context, split.micro_batch)
        if key not in self._models:
            found = job_of_split(self._space, self._setting, split)
            if found is None:
                return None
            self._models[key] = self._model(found.job)
        return self._microbatches(split) * self._models[key]

    def with_experts(self, split: Split, seconds: float) -> float | None:
        """A better bound than the one of `of`, which is `seconds`: with the experts and the exchange of tokens of this split."""
        tokens = split.micro_batch / (split.context * (split.tensor if split.sequence else 1))
        key = (tokens, split.sequence, split.expert, split.expert_tensor)
        if key not in self._experts:
            found = job_of_split(self._space, self._setting, split)
            if found is None:
                return None
            self._experts[key] = self._more_than_least(found.job)
        return seconds + self._microbatches(split) * self._experts[key]

    def _microbatches(self, split: Split) -> float:
        """Microbatches of an iteration for each pipeline rank, divided by the number of these ranks."""
        scale = self._space.scale
        return scale.global_batch * split.tensor * split.context / (split.micro_batch * scale.world)

    def _model(self, job: TrainingJob) -> float:
        """Seconds of a microbatch in all layers.

        If the first layer of each chunk has userbuffers: the faster of no such layer and of such layers only.
        """
        layers = layer_kinds(job.model, job.precision.fp8)
        found = [self._seconds_of_layers(job, layers)]
        if one_projection_in_userbuffers(job):
            marked = tuple((kind._replace(projects_in_userbuffers=True), times) for kind, times in layers)
            found.append(self._seconds_of_layers(job, marked))
        return min(found)

    def _seconds_of_layers(self, job: TrainingJob, layers: LayerRuns) -> float:
        modules = _modules(job, layers)
        found = sum(times * self._seconds(job, work) for module, times in modules for work in _works(job, module))
        for part, times in _exchanges(modules):
            for work in _works(job, part):
                found += times * (ROUNDING * self._least_seconds(work) - self._seconds(job, work))
        return found

    def _more_than_least(self, job: TrainingJob) -> float:
        """Seconds of a microbatch in `EXCHANGE` of all layers, less those that `_model` has.

        Without messages, if another microbatch hides them in some of the layouts.
        """
        parts = _exchanges(_modules(job, layer_kinds(job.model, job.precision.fp8)))
        works = [(times, work) for part, times in parts for work in _works(job, part)]
        if self._space.problem.given.flags.overlap_moe_expert_parallel_comm:
            works = [(times, work._replace(messages=())) for times, work in works]
        return sum(times * (self._seconds(job, work) - self._least_seconds(work)) for times, work in works)

    def _least_seconds(self, work: PassWork) -> float:
        """Seconds of the GEMMs at the highest efficiency."""
        problem = self._space.problem
        gemms = ((kernel, count) for kernel, count in work.kernels if isinstance(kernel, Gemm))
        return sum(count * least_gemm_seconds(gemm, problem.speed, problem.rates) for gemm, count in gemms)

    def _seconds(self, job: TrainingJob, work: PassWork) -> float:
        found = pass_run(job, work, self._space.problem.speed, self._space.problem.rates)
        return found.device.total + found.synchronization


def _modules(job: TrainingJob, layers: LayerRuns) -> ModuleRuns:
    """The modules of the whole model in one chunk."""
    return chunk_modules(module_inputs(job), ChunkKind(layers=layers, mtp_layers=job.model.mtp_num_layers)) or ()


def _works(job: TrainingJob, module: Module) -> list[PassWork]:
    """The work of a module in forward and in backward."""
    context, settings = work_context(job), settings_of(job)
    return [module.derived(block_work, direction, context, settings) for direction in ("forward", "backward")]


def _exchanges(modules: ModuleRuns) -> Iterator[tuple[Module, int]]:
    """The parts that depend on the expert-parallel sizes, with their number."""
    for module, times in modules:
        if module.kind in EXCHANGE:
            yield module, times
        else:
            yield from _exchanges(tuple((child, times) for child in module.children))
