"""Jobs of the layouts of a space."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.options import changes_of
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.specs import ParallelSpec, PipelineSpec, TrainingJob
from analyzer.specs.rules import first_violation


class SplitJob(NamedTuple):
    """A job with a split, and with the recomputation that needs the least time."""

    job: TrainingJob
    stages: Stages
    """Its distribution of layers: one that is legal."""


def job_of_split(space: Space, setting: int, split: Split) -> SplitJob | None:
    """A job with a split; None if no distribution of layers is legal."""
    for stages in space.stages(split):
        if first_violation(resized(space.problem.given, split, stages)) is not None:
            continue
        job = job_of_layout(space, Layout(setting, split, stages, base_recompute(space)))
        if job is not None:
            return SplitJob(job, stages)
    return None


def job_of_layout(space: Space, layout: Layout) -> TrainingJob | None:
    """The job of a layout; None if Megatron refuses it."""
    try:
        return space.problem.job(layout_changes(space, layout))
    except AnalyzerError:
        return None


def layout_changes(space: Space, layout: Layout) -> dict[str, object]:
    """The options that a layout changes, by dest."""
    return changes_of(layout, space.settings[layout.setting], space.problem.arguments, layers=space.scale.layers)


def base_recompute(space: Space) -> Recompute:
    """The recomputation that needs the least time: none, if it is searched."""
    return Recompute() if "recompute" in space.over else space.given.recompute


def resized(job: TrainingJob, split: Split, stages: Stages) -> TrainingJob:
    """A job with the sizes of a layout, for a quick look at the rules and the groups. Its batch and model are not changed."""
    parallel = replace(
        job.parallel,
        tensor=split.tensor,
        context=split.context,
        expert=split.expert,
        expert_tensor=split.expert_tensor,
        sequence_parallel=split.tensor > 1,
        pipeline=stages.pipeline,
        virtual_pipeline=None,
        microbatch_group_size=None,
        pipeline_layout=_pipeline_layout(job.parallel, stages),
    )
    return replace(job, parallel=parallel)


def with_stages(space: Space, job: TrainingJob, stages: Stages) -> TrainingJob:
    """A job of the space with another distribution of layers and the same global batch."""
    given = space.problem.given.parallel
    virtual = given.virtual_pipeline if stages.given else stages.virtual if stages.virtual > 1 else None
    overlaps = bool(space.problem.arguments.get("overlap_p2p_comm"))
    parallel = replace(
        job.parallel,
        pipeline=stages.pipeline,
        virtual_pipeline=virtual,
        overlap_p2p=virtual is not None and overlaps,
        pipeline_layout=_pipeline_layout(given, stages),
        microbatch_group_size=given.microbatch_group_size if stages.given else None,
    )
    batch, before = job.batch, job.parallel.pipeline
    batch = replace(
        batch,
        microbatches=batch.microbatches * stages.pipeline // before,
        first_microbatches=batch.first_microbatches * stages.pipeline // before,
    )
    flags = job.flags
    if stages.pipeline == 1 and flags.defer_embedding_wgrad:
        flags = replace(flags, defer_embedding_wgrad=False)
    if virtual is None and stages.pipeline > 1 and flags.overlap_moe_expert_parallel_comm:
        flags = replace(flags, overlap_moe_expert_parallel_comm=False, delay_wgrad_compute=False)
    return replace(job, parallel=parallel, batch=batch, flags=flags)


def _pipeline_layout(given: ParallelSpec, stages: Stages) -> PipelineSpec:
    if stages.given:
        return given.pipeline_layout
    return PipelineSpec(num_layers_in_first=stages.first, num_layers_in_last=stages.last)
