"""Lower bounds of the time of all layouts with a split, without a look at each split's modules.

The modules of attention, and of the whole layer without experts, do not depend on the expert-parallel sizes. So their time is
computed once for splits that differ in these sizes only. The experts count with their FLOPs at the highest efficiency, and the
exchange of tokens with the bytes of one all-to-all over the links of its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.space import Split, Stages
from analyzer.layout_search.split_jobs import job_of_split, resized
from analyzer.modules.inputs import module_inputs, one_projection_in_userbuffers
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerRuns
from analyzer.modules.models.gpt import chunk_modules, layer_kinds
from analyzer.modules.models.parts import ChunkKind
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.time.kernels.seconds import least_gemm_seconds
from analyzer.time.links import Span, span_of
from analyzer.time.message_seconds import message_seconds
from analyzer.time.pass_seconds import pass_run
from analyzer.time.pass_work import Message, PassWork, block_work, settings_of
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import Gemm

EXCHANGE: Final = frozenset({ModuleKind.DISPATCH, ModuleKind.EXPERTS, ModuleKind.COMBINE})
"""Modules whose time depends on the expert-parallel sizes."""
ROUNDING: Final = 0.98
"""Tokens are rounded when they are distributed over experts."""


class _Model(NamedTuple):
    """Seconds of a microbatch in all layers, on ranks with one size of tensor and context parallelism."""

    seconds: float
    """Without the exchange of tokens; GEMMs of experts at the highest efficiency."""
    messages: tuple[tuple[Message, float], ...]
    """The all-to-alls of the exchange of tokens with their number."""


class Floors:
    """The bounds of the splits of a space, for one setting."""

    def __init__(self, space: Space, setting: int) -> None:
        self._space, self._setting = space, setting
        self._models: dict[tuple[int, ...], _Model] = {}
        self._references: dict[tuple[int, ...], tuple[tuple[Message, float], ...] | None] = {}
        self._spans: dict[tuple[int, int, int], Span] = {}
        self._moe = space.problem.given.model.moe is not None

    def of(self, split: Split) -> float | None:
        """Seconds of an iteration if all stages have equal work; None if Megatron refuses every layout with the split."""
        key = (split.tensor, split.sequence, split.context, split.micro_batch)
        if key not in self._models:
            found = job_of_split(self._space, self._setting, split)
            if found is None:
                return None
            self._models[key] = self._model(found.job)
        return self._iteration(split, self._models[key], self._exchange(split))

    def _iteration(self, split: Split, model: _Model, exchange: float) -> float:
        scale = self._space.scale
        microbatches = scale.global_batch * split.tensor * split.context / (split.micro_batch * scale.world)
        return ROUNDING * microbatches * (model.seconds + exchange)

    def _model(self, job: TrainingJob) -> _Model:
        """All layers. If the first layer of each chunk has userbuffers: the faster of no such layer and of such layers only."""
        layers = layer_kinds(job.model, job.precision.fp8)
        found = [self._model_of(job, layers)]
        if one_projection_in_userbuffers(job):
            marked = tuple((kind._replace(projects_in_userbuffers=True), times) for kind, times in layers)
            found.append(self._model_of(job, marked))
        return min(found, key=lambda model: model.seconds)

    def _model_of(self, job: TrainingJob, layers: LayerRuns) -> _Model:
        problem = self._space.problem
        context, settings = work_context(job), settings_of(job)
        everything = ChunkKind(layers=layers, mtp_layers=job.model.mtp_num_layers)
        total = 0.0
        messages: list[tuple[Message, float]] = []

        def run(work: PassWork) -> float:
            found = pass_run(job, work, problem.speed, problem.rates)
            return found.device.total + found.synchronization

        for module, times in chunk_modules(module_inputs(job), everything) or ():
            for direction in ("forward", "backward"):
                total += times * run(module.derived(block_work, direction, context, settings))
                for part in _exchanges(module):
                    work = part.derived(block_work, direction, context, settings)
                    gemms = [(kernel, count) for kernel, count in work.kernels if isinstance(kernel, Gemm)]
                    least = sum(count * least_gemm_seconds(gemm, problem.speed, problem.rates) for gemm, count in gemms)
                    total += times * (least - run(work._replace(synchronizations=0)))
                    messages += [(each, times * count) for each, count in work.messages if each.kind == "all_to_all"]
        return _Model(total, tuple(messages))

    def _exchange(self, split: Split) -> float:
        """Seconds of the all-to-alls of a microbatch, with the bytes of experts without tensor parallelism."""
        if not self._moe or split.expert == 1:
            return 0.0
        stages = next(iter(self._space.stages(split)), None)
        reference = self._reference(split)
        if stages is None or reference is None:
            return 0.0
        problem = self._space.problem
        span = self._span(split.expert, split.expert_tensor, stages)
        seconds = 0.0
        for message, count in reference:
            one = message_seconds(
                message.kind,
                message.payload,
                span,
                problem.speed,
                problem.rates,
                exchange=message.exchange,
                choices=message.choices,
            )
            exposed = problem.rates.ep_overlap_exposed if message.exposure == "microbatch" else 1.0
            seconds += count * one.transfer * (exposed + (1 - exposed) * problem.rates.slowdown)
        return seconds

    def _span(self, expert: int, expert_tensor: int, stages: Stages) -> Span:
        """The span of the ranks that exchange tokens. It does not depend on the other sizes of a split."""
        key = (expert, expert_tensor, stages.pipeline)
        if key not in self._spans:
            problem = self._space.problem
            job = resized(problem.given, Split(expert=expert, expert_tensor=expert_tensor), stages)
            self._spans[key] = span_of(job, "ep", problem.speed)
        return self._spans[key]

    def _reference(self, split: Split) -> tuple[tuple[Message, float], ...] | None:
        """The all-to-alls of a split with the same tensor, context and micro-batch size, and two expert-parallel ranks."""
        key = (split.tensor, split.sequence, split.context, split.micro_batch)
        if key not in self._references:
            found = job_of_split(self._space, self._setting, split._replace(expert=2, expert_tensor=1))
            self._references[key] = None if found is None else self._model(found.job).messages
        return self._references[key]


def _exchanges(module: Module) -> Iterator[Module]:
    if module.kind in EXCHANGE:
        yield module
        return
    for child in module.children:
        yield from _exchanges(child)
