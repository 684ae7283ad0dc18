"""The order of the steps of an iteration of a rank."""

from __future__ import annotations

from analyzer.passes.deferred_output_gradients import deferring_microbatches
from analyzer.schedule.pipeline import Step, equivalent_microbatches, steps
from analyzer.specs import TrainingJob
from analyzer.specs.release import is_before


def order_of(job: TrainingJob, pipeline_rank: int, microbatches: int) -> tuple[Step, ...]:
    """The steps of an iteration, with as few microbatches as are needed to reach the same peak."""
    last = pipeline_rank == job.parallel.pipeline - 1
    return iteration_steps(job, pipeline_rank, microbatches_to_peak(job, microbatches, pipeline_rank=pipeline_rank, last=last))


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
            legacy=is_before(job.megatron, "0.10"),
            combined=job.flags.overlap_moe_expert_parallel_comm,
            pipeline_rank=pipeline_rank,
        ),
    )


def iteration_steps(job: TrainingJob, pipeline_rank: int, microbatches: int) -> tuple[Step, ...]:
    """The steps of an iteration of a pipeline rank with a number of microbatches."""
    parallel = job.parallel
    return steps(
        pipeline=parallel.pipeline,
        pipeline_rank=pipeline_rank,
        chunks=parallel.chunks,
        microbatches=microbatches,
        group_size=parallel.microbatch_group_size,
        legacy=is_before(job.megatron, "0.10"),
        combined=job.flags.overlap_moe_expert_parallel_comm,
    )
