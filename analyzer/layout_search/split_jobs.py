"""Jobs of the layouts of a space."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.options import by_flag, changes_of, staged_pattern
from analyzer.layout_search.overlaps import ALWAYS, without_effect
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.specs import ParallelSpec, PipelineSpec, TrainingFlags, TrainingJob
from analyzer.specs.rules.model import model_violations, sequence_violations
from analyzer.specs.rules.sizes import parallel_violations
from analyzer.specs.rules.stages import stage_violations


class SplitJob(NamedTuple):
    """A job with a split, and with the recomputation that needs the least time."""

    job: TrainingJob
    stages: Stages
    """Its distribution of layers: one that is legal."""


def job_of_split(space: Space, setting: int, split: Split) -> SplitJob | None:
    """A job with a split; None if no distribution of layers is legal."""
    for stages in space.stages(split):
        if not _sizes_are_legal(resized(space.problem.given, split, stages)):
            continue
        job = job_of_layout(space, Layout(setting, split, stages, base_recompute(space)))
        if job is not None:
            return SplitJob(job, stages)
    return None


def _sizes_are_legal(job: TrainingJob) -> bool:
    """Whether the sizes of a job keep the rules that no other option changes. The vocabulary is padded for every size."""
    parallel, model = job.parallel, replace(job.model, padded_vocab_size=0)
    found = chain(
        parallel_violations(parallel, megatron=job.megatron),
        stage_violations(model.num_layers, parallel, mtp_layers=model.mtp_num_layers),
        model_violations(model, parallel, megatron=job.megatron),
        sequence_violations(job.batch.seq_length, parallel),
    )
    return next(found, None) is None


def job_of_layout(space: Space, layout: Layout) -> TrainingJob | None:
    """The job of a layout; None if Megatron refuses it or reduces its gradients wrongly, or if it changes an option that must not
    change."""
    if not space.reduces_experts(layout.split):
        return None
    changes = layout_changes(space, layout)
    if not space.keep.isdisjoint(changes.keys() - space.problem.with_any_change.keys()):
        return None
    return space.jobs.of(changes)


def layout_changes(space: Space, layout: Layout) -> dict[str, object]:
    """The options that a layout changes, by dest, with those that a launch with any change needs."""
    problem = space.problem
    setting = without_effect(space.settings[layout.setting].changes, _replicas(space, layout.split, layout.stages.pipeline))
    changes = changes_of(layout, setting, problem.arguments, layers=space.scale.layers)
    return {**changes, **problem.with_any_change} if changes else changes


def _replicas(space: Space, split: Split | ParallelSpec, pipeline: int) -> int:
    """The most ranks that have the same parameters: those of experts, or all others."""
    tensors = [split.tensor] if space.problem.given.model.moe is None else [split.tensor, split.expert * split.expert_tensor]
    return space.scale.world // (pipeline * min(tensors))


def changed_options(space: Space, layout: Layout) -> dict[str, object]:
    """The options that a layout changes, by flag."""
    return by_flag(layout_changes(space, layout), space.problem.arguments)


def base_recompute(space: Space) -> Recompute:
    """The recomputation that needs the least time: none, if it is searched."""
    return Recompute() if "recompute" in space.over else space.given.recompute


def resized(job: TrainingJob, split: Split, stages: Stages) -> TrainingJob:
    """A job with the sizes of a layout, for a quick look at the rules and the groups.

    Its batch and model are not changed. Options that other dimensions may change, such as the order of ranks, have their defaults.
    """
    parallel = replace(
        job.parallel,
        tensor=split.tensor,
        context=split.context,
        expert=split.expert,
        expert_tensor=split.expert_tensor,
        sequence_parallel=split.sequence,
        pipeline=stages.pipeline,
        virtual_pipeline=job.parallel.virtual_pipeline if stages.given else None,
        microbatch_group_size=None,
        pipeline_layout=_pipeline_layout(job.parallel, stages),
        order=ParallelSpec.order,
        distributed_optimizer_instances=1,
        cp_comm_type="p2p",
        cp_inner_size=1,
    )
    return replace(job, parallel=parallel)


def with_stages(space: Space, setting: int, job: TrainingJob, stages: Stages) -> TrainingJob:
    """A job of the space with another distribution of layers and the same setting and global batch.

    It equals the job that `Space.jobs` derives from the options, without its assumptions and warnings, and takes a fifteenth of the
    time: a search has many more distributions than layouts that it evaluates.
    """
    given = space.problem.given.parallel
    virtual = given.virtual_pipeline if stages.given else stages.virtual if stages.virtual > 1 else None
    overlaps = bool(space.problem.arguments.get("overlap_p2p_comm"))
    parallel = replace(
        job.parallel,
        pipeline=stages.pipeline,
        virtual_pipeline=virtual,
        overlap_p2p=virtual is not None and overlaps,
        pipeline_layout=_layout_of(space, stages),
        microbatch_group_size=given.microbatch_group_size if stages.given else None,
    )
    batch, before = job.batch, job.parallel.pipeline
    batch = replace(
        batch,
        microbatches=batch.microbatches * stages.pipeline // before,
        first_microbatches=batch.first_microbatches * stages.pipeline // before,
    )
    gathers = space.problem.given.optimizer.overlap_param_gather_with_optimizer_step and virtual is not None
    optimizer = replace(job.optimizer, overlap_param_gather_with_optimizer_step=gathers)
    reductions = {dest: value for dest, value in space.settings[setting].changes.items() if dest in ALWAYS}
    if reductions:
        shown = without_effect(reductions, _replicas(space, job.parallel, stages.pipeline))
        given_optimizer = space.problem.given.optimizer
        optimizer = replace(
            optimizer,
            overlap_grad_reduce="overlap_grad_reduce" in shown or given_optimizer.overlap_grad_reduce,
            overlap_param_gather="overlap_param_gather" in shown or given_optimizer.overlap_param_gather,
        )
    return replace(job, parallel=parallel, batch=batch, flags=_flags(space, job, parallel), optimizer=optimizer)


def _layout_of(space: Space, stages: Stages) -> PipelineSpec:
    pattern = None if stages.given else staged_pattern(stages, space.problem.arguments)
    if pattern is None:
        return _pipeline_layout(space.problem.given.parallel, stages)
    return PipelineSpec(layout=pattern.layout)


def _flags(space: Space, job: TrainingJob, parallel: ParallelSpec) -> TrainingFlags:
    """The flags of a job with other stages: those of the launch that the layout does not exclude."""
    given = space.problem.given.flags
    overlaps = (
        given.overlap_moe_expert_parallel_comm
        and parallel.expert > 1
        and (parallel.pipeline == 1 or parallel.virtual_pipeline is not None)
        and job.recompute.granularity != "full"
    )
    deferred = given.defer_embedding_wgrad and parallel.pipeline > 1
    return replace(
        job.flags,
        defer_embedding_wgrad=deferred,
        wgrad_deferral_limit=given.wgrad_deferral_limit if deferred else 0,
        overlap_moe_expert_parallel_comm=overlaps,
        delay_wgrad_compute=given.delay_wgrad_compute and overlaps,
        early_attention_backward=given.early_attention_backward and overlaps,
    )


def _pipeline_layout(given: ParallelSpec, stages: Stages) -> PipelineSpec:
    if stages.given:
        return given.pipeline_layout
    return PipelineSpec(num_layers_in_first=stages.first, num_layers_in_last=stages.last)
