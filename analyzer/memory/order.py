"""The iteration of a rank of a job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import parameters
from analyzer.passes.deferred_output_gradients import deferring_microbatches
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.messages import Ring
from analyzer.program.schedule.pipeline import equivalent_microbatches, steps
from analyzer.program.schedule.references import Ends
from analyzer.specs import TrainingJob


def equivalent_iteration(job: TrainingJob, pipeline_rank: int, microbatches: int, chunks: Sequence[Chunk]) -> Iteration:
    """An iteration with as few microbatches as are needed to reach the same peak."""
    last = pipeline_rank == job.parallel.pipeline - 1
    number = microbatches_to_peak(job, microbatches, pipeline_rank=pipeline_rank, last=last)
    return iteration_of(job, pipeline_rank, number, chunks)


def microbatches_to_peak(job: TrainingJob, microbatches: int, *, pipeline_rank: int = 0, last: bool = True) -> int:
    """A small number of microbatches that reaches the peak of `microbatches` on `pipeline_rank` and later ranks.

    `last`: also on the last one, which can defer weight gradients of the output layer.
    """
    parallel = job.parallel
    return max(
        deferring_microbatches(job, microbatches) if last else 0,
        equivalent_microbatches(
            pipeline=parallel.pipeline,
            chunks=parallel.chunks,
            microbatches=microbatches,
            group_size=parallel.microbatch_group_size,
            legacy=job.core.legacy_interleaving,
            combined=job.flags.overlap_moe_expert_parallel_comm,
            pipeline_rank=pipeline_rank,
        ),
    )


def iteration_of(job: TrainingJob, pipeline_rank: int, microbatches: int, chunks: Sequence[Chunk]) -> Iteration:
    """The iteration of a pipeline rank, which has these chunks, with a number of microbatches."""
    parallel = job.parallel
    return _iteration(
        parallel.pipeline,
        pipeline_rank,
        parallel.chunks,
        microbatches,
        parallel.microbatch_group_size,
        job.core.legacy_interleaving,
        job.flags.overlap_moe_expert_parallel_comm,
        parallel.overlap_p2p,
        ends_of(chunks, leaf=_references_leaf(job)),
    )


@lru_cache(maxsize=256)
def _iteration(
    pipeline: int,
    pipeline_rank: int,
    chunks: int,
    microbatches: int,
    group_size: int | None,
    legacy: bool,
    combined: bool,
    overlaps: bool,
    ends: Ends,
) -> Iteration:
    """Layouts with the same pipeline share it."""
    order = steps(
        pipeline=pipeline,
        pipeline_rank=pipeline_rank,
        chunks=chunks,
        microbatches=microbatches,
        group_size=group_size,
        legacy=legacy,
        combined=combined,
    )
    ring = Ring(pipeline, group_size or pipeline, overlaps, ends.first[0], ends.last[-1]) if chunks > 1 else None
    return Iteration(order, ends, ring)


def ends_of(chunks: Sequence[Chunk], *, leaf: bool = False) -> Ends:
    """Which chunks of a rank are at an end of the model. `leaf`: `has_leaf_input`."""
    return Ends(tuple(chunk.pre_process for chunk in chunks), tuple(chunk.post_process for chunk in chunks), leaf)


def _references_leaf(job: TrainingJob) -> bool:
    """Whether the output of a microbatch, which the schedule references, keeps such an input until the next microbatch."""
    return has_leaf_input(job) and (job.parallel.pipeline > 1 or job.core.keeps_previous_output)


def has_leaf_input(job: TrainingJob) -> bool:
    """Whether the input of the first layer is a leaf of autograd that gets a gradient: the output of a frozen embedding."""
    adapters, chosen = job.model.adapters, job.model.frozen_parameters
    if chosen is not None:
        from analyzer.passes.stages import stage_models

        return next(parameters(stage_models(job)[0].trees[0])).frozen
    return adapters is not None and adapters.request_input_gradient(checkpoints=job.recompute.granularity == "full")
