"""What a search changes: the dimensions of `--info-search-over`, and the values that each of them may have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from math import gcd
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.recompute import MODULES
from analyzer.layout_search.options import OF_RECOMPUTE
from analyzer.layout_search.overlaps import FUSIONS, OVERLAPS, Setting, suits_split, with_overlaps
from analyzer.layout_search.problem import Changes, Jobs, Problem
from analyzer.layout_search.space import (
    MICRO_BATCHES,
    MOST_CONTEXT,
    MOST_TENSOR,
    MOST_VIRTUAL,
    UNEVEN,
    Layout,
    Recompute,
    Scale,
    Sizes,
    Split,
    Stages,
    distributions,
    divides,
    divisors,
    splits,
)
from analyzer.memory.chunk_memory import chunk_figures
from analyzer.memory.screen import kinds_of_stages
from analyzer.modules.inputs import module_inputs
from analyzer.modules.models.gpt import chunk_modules
from analyzer.program.chunks import Block
from analyzer.specs import PipelineSpec
from analyzer.specs.option_names import flag_of
from analyzer.specs.release import is_before
from analyzer.specs.release_changes import core_failures
from analyzer.specs.stage_sizes import layers_of_stages
from analyzer.units import ceil_div

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob

USUAL: Final = ("tp", "pp", "vpp", "layers", "cp", "ep", "etp", "micro-batch", "recompute", "optimizer", "overlap")
"""Dimensions of a search that names none."""
ON_REQUEST: Final = ("cp-comm", "instances", "fsdp", "offload", "precision", "order")
DIMENSIONS: Final = (*USUAL, *ON_REQUEST)
DESTS: Final[Mapping[str, tuple[str, ...]]] = {
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    "layers": ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "micro-batch": ("micro_batch_size",),
    "recompute": OF_RECOMPUTE,
    "optimizer": ("use_distributed_optimizer",),
    "overlap": (),
    "cp-comm": ("cp_comm_type",),
    "instances": ("num_distributed_optimizer_instances",),
    "fsdp": ("use_megatron_fsdp",),
    "offload": ("optimizer_cpu_offload", "fine_grained_activation_offloading"),
    "precision": ("fp8", "fp8_recipe"),
    "order": ("use_tp_pp_dp_mapping",),
}
"""The options that a dimension changes. A dimension is not searched if one of them is kept.

Those of `overlap` are in `analyzer.layout_search.overlaps`: each of them can be kept, and the others are searched.
"""
RECIPES: Final = ("delayed", "tensorwise", "blockwise", "mxfp8")
OFFLOADED: Final = ("core_attn", "attn_proj", "expert_fc1", "moe_act")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The layouts of a search."""

    problem: Problem
    over: frozenset[str]
    """The dimensions that are searched."""
    keep: frozenset[str] = frozenset()
    """Dests of options that must not change."""
    least: bool = False
    """Whether the space has only the layouts that may need the least memory: of the dimensions that are searched, one sequence in a
    microbatch, no virtual stages and no overlapped communication."""

    @cached_property
    def jobs(self) -> Jobs:
        """The jobs of changed launches."""
        return Jobs(self.problem)

    @cached_property
    def scale(self) -> Scale:
        """What the sizes must divide."""
        job = self.problem.given
        return Scale(job.parallel.world_size, job.batch.global_batch_size, job.model.num_layers)

    @cached_property
    def given(self) -> Layout:
        """The layout of the launch."""
        parallel, batch = self.problem.given.parallel, self.problem.given.batch
        split = Split(
            tensor=parallel.tensor,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            micro_batch=batch.micro_batch_size,
            sequence=parallel.sequence_parallel,
        )
        return Layout(0, split, Stages(parallel.pipeline, parallel.chunks, given=True), Recompute(given=True))

    @cached_property
    def sizes(self) -> Sizes:
        """The values of each size."""
        world, layers = self.scale.world, self.scale.layers
        moe = self.problem.given.model.moe
        given = self.given
        experts = 1 if moe is None else moe.num_experts
        tuning = self.problem.given.tuning
        micros: Sequence[int] = [tuning.sequences_per_sample * each for each in MICRO_BATCHES]
        if tuning.filled:  # their number follows from their tokens, and is not an option
            micros = [given.split.micro_batch]

        def values(dimension: str, possible: Sequence[int], present: int) -> tuple[int, ...]:
            return tuple(sorted({*possible, present})) if dimension in self.over else (present,)

        expert_tensor: Sequence[int] | None = (given.split.expert_tensor,)
        if moe is not None and "etp" in self.over:
            expert_tensor = values("etp", divisors(world, MOST_TENSOR), given.split.expert_tensor)
        elif self.problem.arguments.get("expert_tensor_parallel_size") is None:
            expert_tensor = None
        return Sizes(
            tensor=values("tp", divisors(world, MOST_TENSOR), given.split.tensor),
            context=values("cp", divisors(world, MOST_CONTEXT), given.split.context),
            expert=values("ep", [each for each in divisors(world, experts) if experts % each == 0], given.split.expert),
            expert_tensor=expert_tensor,
            micro_batch=micros[:1] if self._is_least("micro-batch") else values("micro-batch", micros, given.split.micro_batch),
            pipeline=values("pp", divisors(world, layers), given.stages.pipeline),
            virtual=(1,) if self._is_least("vpp") else values("vpp", range(1, MOST_VIRTUAL + 1), given.stages.virtual),
            uneven=UNEVEN if "layers" in self.over else (0,),
        )

    def _is_least(self, dimension: str) -> bool:
        """Whether a dimension that is searched has only the value with the least memory, which is 1."""
        return self.least and dimension in self.over

    def splits(self) -> Iterator[Split]:
        """The splits whose sizes divide the world and the batch."""
        for split in splits(self.sizes, self.scale):
            if not self.reduces_experts(split):
                continue
            for sequence in self.sequences(split.tensor):
                yield split._replace(sequence=sequence)

    def reduces_experts(self, split: Split) -> bool:
        """Whether gradients of experts are summed over the ranks with the same part of them; the sizes of the launch are kept.

        Without expert parallelism Megatron reduces them with all other gradients, over the ranks with the same part of those: with
        another tensor-parallel size of the experts, it adds gradients of different weights, or leaves out some of them. Source: the
        attribute `allreduce` of the weights (core/extensions/transformer_engine.py, core/transformer/moe/experts.py, 0.16.1).
        """
        given = self.problem.given
        if split.expert > 1 or split.expert_tensor == split.tensor or given.model.moe is None or given.fsdp is not None:
            return True
        return split[:4] == self.given.split[:4]

    def sequences(self, tensor: int) -> tuple[bool, ...]:
        """Whether sequence parallelism may be on. It comes with tensor parallelism where that is searched."""
        if tensor == 1:
            return (False,)
        given = bool(self.problem.arguments.get("sequence_parallel"))
        if given or "tp" not in self.over or "sequence_parallel" in self.keep:
            return (given,)
        return (True, False) if tensor == self.given.split.tensor else (True,)

    def stages(self, split: Split) -> Iterator[Stages]:
        """The distributions of layers for a split, that of the launch last."""
        for pipeline in self.sizes.pipeline:
            if divides(split, pipeline, self.scale):
                yield from self._distributions(pipeline)
        if self.problem.runs and divides(split, self.given.stages.pipeline, self.scale):
            yield self.given.stages

    def _distributions(self, pipeline: int) -> tuple[Stages, ...]:
        """The distributions of layers over a number of pipeline ranks, without that of the launch."""
        if pipeline not in self._known_distributions:
            sizes, runs = self.sizes, self.problem.runs
            every = distributions(pipeline, self.scale.layers, tuple(sizes.virtual), tuple(sizes.uneven))
            found = tuple(each for each in every if self.may_have(each) and not (runs and self._is_given(each)))
            self._known_distributions[pipeline] = found
        return self._known_distributions[pipeline]

    @cached_property
    def _known_distributions(self) -> dict[int, tuple[Stages, ...]]:
        return {}

    @cached_property
    def candidates(self) -> int:
        """The number of layouts whose sizes divide the world and the batch."""
        ways = {each: sum(len(self.recomputes(stages)) for stages in self._distributions(each)) for each in self.sizes.pipeline}
        given, count = self.given.stages, 0
        for split in self.splits():
            layouts = sum(number for pipeline, number in ways.items() if divides(split, pipeline, self.scale))
            if self.problem.runs and divides(split, given.pipeline, self.scale):
                layouts += len(self.recomputes(given))
            count += layouts * len(list(self.settings_of(split)))
        return count

    def may_have(self, stages: Stages) -> bool:
        """Whether a distribution may be used: if layers are not searched, a launch with its own one keeps it in a pipeline.

        The pattern of a hybrid model gives its virtual stages, from core 0.17 on.
        """
        own, given = self.problem.given.parallel.pipeline_layout, self.problem.given
        if given.model.hybrid is not None and stages.virtual > 1 and is_before(given.megatron, "0.17"):
            return False
        return stages.pipeline == 1 or "layers" in self.over or own == PipelineSpec()

    def _is_given(self, stages: Stages) -> bool:
        """Whether a distribution has the same layers on every virtual stage as that of the launch."""
        parallel, by_pattern = self.problem.given.parallel, self.problem.given.model.hybrid is not None
        listed = parallel.pipeline_layout.layout is not None and not by_pattern
        if (stages.pipeline, stages.virtual) != self.given.stages[:2] or listed:
            return False
        split = PipelineSpec(num_layers_in_first=stages.first, num_layers_in_last=stages.last)
        return layers_of_stages(self.scale.layers, replace(parallel, pipeline_layout=split)) == self._layers_of_given

    @cached_property
    def _layers_of_given(self) -> tuple[int, ...]:
        return layers_of_stages(self.scale.layers, self.problem.given.parallel)

    def recomputes(self, stages: Stages) -> tuple[Recompute, ...]:
        """The ways to recompute activations for a distribution of layers, that of the launch first.

        Stacks of hybrid models recompute no layers before core 0.18.
        """
        given = self.problem.given
        if given.model.hybrid is not None and is_before(given.megatron, "0.18"):
            return (self.given.recompute,)
        most = ceil_div(self.scale.layers, stages.pipeline * stages.virtual) + max(UNEVEN)
        divided = self._common_divisor(stages) if core_failures(self.problem.given.megatron).uniform_groups_complete else 0
        return self._choices(most.bit_length(), divided & -divided)

    def _common_divisor(self, stages: Stages) -> int:
        """The greatest common divisor of the numbers of layers of the virtual stages."""
        if stages.given:
            return gcd(*self._layers_of_given)
        uneven = [layers for layers in (stages.first, stages.last) if layers is not None]
        others = stages.pipeline - len(uneven)
        equal = (self.scale.layers - sum(uneven)) // others // stages.virtual if others else 0
        return gcd(equal, *(layers // stages.virtual for layers in uneven))

    def _choices(self, powers: int, largest: int) -> tuple[Recompute, ...]:
        """The ways to recompute, with so many powers of two as numbers of layers; uniform ones up to `largest` unless it is 0."""
        if (powers, largest) not in self._known_choices:
            full = (Recompute("full", method, 1 << power) for power in range(powers) for method in ("uniform", "block"))
            legal = (each for each in full if not largest or each.method == "block" or (each.layers or 1) <= largest)
            every: tuple[Recompute, ...] = (Recompute(), *self._selective, *legal) if "recompute" in self.over else ()
            if self.problem.runs or not every:
                every = (self.given.recompute, *(each for each in every if each != self._same_as_given))
            self._known_choices[powers, largest] = every
        return self._known_choices[powers, largest]

    @cached_property
    def _known_choices(self) -> dict[tuple[int, int], tuple[Recompute, ...]]:
        return {}

    @cached_property
    def _same_as_given(self) -> Recompute:
        spec = self.problem.given.recompute
        return Recompute(spec.granularity, spec.method, spec.num_layers, spec.modules)

    @cached_property
    def _selective(self) -> tuple[Recompute, ...]:
        """The sets of modules that differ in memory in the layout of the launch.

        A set is left out if one with a module less needs no more memory: it takes no longer.
        """
        if "recompute_modules" not in self.problem.arguments.values:
            return (Recompute("selective", modules=("core_attn",)),)
        usable = [module for module in MODULES if self._memory_of((module,)) is not None]
        known: dict[tuple[str, ...], tuple[int, ...] | None] = {(): self._memory_of(())}
        found = []
        for modules in chain.from_iterable(combinations(usable, count) for count in range(1, len(usable) + 1)):
            known[modules] = memory = self._memory_of(modules)
            smaller = (known[each] for each in combinations(modules, len(modules) - 1))
            if memory is not None and not any(_is_at_most(each, memory) for each in smaller):
                found.append(Recompute("selective", modules=modules))
        return tuple(found)

    def _memory_of(self, modules: tuple[str, ...]) -> tuple[int, ...] | None:
        """Figures of the memory of all kinds of chunks if some modules are recomputed; None if Megatron refuses it."""
        changes: dict[str, object] = dict.fromkeys(OF_RECOMPUTE)
        if modules:
            changes |= {"recompute_granularity": "selective", "recompute_modules": modules}
        job = self.jobs.of(changes)
        return memory_figures(job) if job is not None and (not modules or job.recompute.modules) else None

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Options that are changed together, none first."""
        if "overlap" not in self.over:
            return tuple(Setting(changes, index) for index, changes in enumerate(self.plain_settings))
        usable = FUSIONS if self.least else OVERLAPS
        return with_overlaps(self.problem, self.plain_settings, self.keep, usable)

    def settings_of(self, split: Split) -> Iterator[int]:
        """The settings whose layouts with a split are looked at from the start."""
        for index, setting in enumerate(self.settings):
            if setting.searched and self.suits(setting.changes, split):
                yield index

    def suits(self, changes: Changes, split: Split) -> bool:
        """Whether a split has the communication that the options of a setting hide."""
        return suits_split(changes, split, domain=self.problem.speed.nvlink_domain)

    @cached_property
    def plain_settings(self) -> tuple[Changes, ...]:
        """The settings without options of `analyzer.layout_search.overlaps`."""
        parts: list[list[Changes]] = [[{}]]
        for dimension, choices in _SETTINGS.items():
            if dimension in self.over:
                parts.append([{}, *(each for each in choices(self.problem) if self._may_change(each))])
        found: dict[tuple[tuple[str, object], ...], Changes] = {}
        for combination in product(*parts):
            merged = {dest: value for each in combination for dest, value in each.items()}
            found.setdefault(tuple(sorted(merged.items(), key=str)), merged)
        return tuple(found.values())

    def _may_change(self, changes: Changes) -> bool:
        values = self.problem.arguments.values
        if not self.keep.isdisjoint(changes):
            return False
        differs = any(values.get(dest) != value and (values.get(dest) or value) for dest, value in changes.items())
        return differs and all(dest in values for dest in changes)


def memory_figures(job: TrainingJob) -> tuple[int, ...]:
    """The figures of the memory of a microbatch in every kind of chunk, in bytes."""
    found: list[int] = []
    for kind in dict.fromkeys(kinds_of_stages(job)):
        modules = chunk_modules(module_inputs(job), kind)
        found.extend(chunk_figures([Block(module, "", times) for module, times in modules]) if modules else ())
    return tuple(found)


def _is_at_most(first: tuple[int, ...] | None, second: tuple[int, ...]) -> bool:
    """Whether no figure of the first is above that of the second."""
    return first is not None and all(one <= other for one, other in zip(first, second, strict=True))


def _optimizer(problem: Problem) -> Sequence[Changes]:
    """The distributed optimizer, where Megatron has it for the optimizer of the launch."""
    job = problem.given
    usable = job.optimizer.facts.sharding == "distributed" and not job.optimizer.distributed and job.fsdp is None
    return ({"use_distributed_optimizer": True},) if usable else ()


def _context_communication(_: Problem) -> Sequence[Changes]:
    return tuple({"cp_comm_type": (each,)} for each in ("p2p", "a2a", "all_gather"))


def _instances(problem: Problem) -> Sequence[Changes]:
    most = problem.world.size
    return tuple({"num_distributed_optimizer_instances": each} for each in divisors(most, 64) if each > 1)


def _fsdp(_: Problem) -> Sequence[Changes]:
    sharded = {"use_megatron_fsdp": True, "use_distributed_optimizer": True}
    strategies = ("optim", "optim_grads", "optim_grads_params")
    return tuple({**sharded, "data_parallel_sharding_strategy": each} for each in strategies)


def _offload(problem: Problem) -> Sequence[Changes]:
    optimizer = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    modules = OFFLOADED if problem.given.model.moe is not None else OFFLOADED[:2]
    activations = ({"fine_grained_activation_offloading": True, "offload_modules": (each,)} for each in modules)
    return (optimizer, *activations)


def _precision(problem: Problem) -> Sequence[Changes]:
    """FP8 recipes that the release has: it has no blocks of 128 before 0.13 (`--fp8-recipe`)."""
    known = [each for each in RECIPES if each != "blockwise" or not is_before(problem.given.megatron, "0.13")]
    recipes = tuple({"fp8": "hybrid" if each != "mxfp8" else "e4m3", "fp8_recipe": each} for each in known)
    return ({"fp8": None}, *recipes)


def _order(_: Problem) -> Sequence[Changes]:
    return ({"use_tp_pp_dp_mapping": True}, {"use_tp_pp_dp_mapping": False})


_SETTINGS: Final = {
    "optimizer": _optimizer,
    "cp-comm": _context_communication,
    "instances": _instances,
    "fsdp": _fsdp,
    "offload": _offload,
    "precision": _precision,
    "order": _order,
}


def space_of(problem: Problem, *, over: Sequence[str] = (), keep: Collection[str] = (), least: bool = False) -> Space:
    """The space of a search.

    `over`: dimensions, all of `USUAL` if empty. `keep`: options that must not change, with or without leading dashes. `least`: only
    the layouts that may need the least memory. Raises InputError for an unknown dimension or option.
    """
    for dimension in over:
        if dimension not in DIMENSIONS:
            raise InputError("--info-search-over", f"{dimension!r} is not a dimension", f"use some of {', '.join(DIMENSIONS)}")
        if DESTS[dimension] and not any(dest in problem.arguments.values for dest in DESTS[dimension]):
            fault = f"Megatron-LM {problem.arguments.release} has no option for {dimension}"
            raise InputError("--info-search-over", fault, "leave it out, or name a later release with --info-megatron")
    kept = frozenset(_dest(problem, option) for option in keep)
    searched = {dimension for dimension in over or USUAL if not kept.intersection(DESTS[dimension])}
    return Space(problem=problem, over=frozenset(searched), keep=kept, least=least)


def _dest(problem: Problem, option: str) -> str:
    """The dest of an option."""
    flag = "--" + option.lstrip("-")
    arguments = problem.arguments
    known = {flag_of(dest): dest for dest in arguments.values} | {spelled: dest for dest, spelled in arguments.spelled.items()}
    if flag not in known:
        remedy = "name options of Megatron, such as tensor-model-parallel-size"
        raise InputError("--info-keep", f"{option} is not an option of Megatron {arguments.release}", remedy)
    return known[flag]
