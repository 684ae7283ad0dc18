"""Data-parallel communication: gradients reduced and parameters gathered, bucket by bucket.

Source: megatron/core/distributed/param_and_grad_buffer.py (`_ParamAndGradBucketGroup.start_grad_sync` and `start_param_sync`) and
reduce_scatter_with_fp32_accumulation.py, 0.16.1. Averaging in the collective, overlap with the backward or forward pass and
coalescing of the buckets of a group change neither sizes nor calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from analyzer.communication.calls import Call, Kind
from analyzer.layout.data_parallel import reduction_size
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer


def data_parallel_calls(job: TrainingJob, pipeline_rank: int, buffers: Sequence[Sequence[Buffer]]) -> Iterator[Call]:
    """One call for each size of bucket, with the number of such buckets, also those of other chunks.

    `buffers` are the gradient and parameter buffers of each chunk. Not for FSDP, which has different buckets.
    """
    reductions = 2 if _reduces_twice(job, pipeline_rank) else 1
    counts: Counter[Call] = Counter()
    for chunk in buffers:
        for buffer in chunk:
            counts.update(_calls(job, buffer))
    if not job.optimizer.overlap_param_gather and job.megatron != "2023" and not job.optimizer.facts.orthogonalizes:
        # dense and expert parameters have separate optimizers, and each gathers the full chunk (`step_with_ready_grads`), also that
        # of dense parameters if none of them is trained
        groups = {buffer.group for chunk in buffers for buffer in chunk}
        optimizers = max(len(groups), 2 if "edp" in groups else 1)
        for call in counts:
            counts[call] *= optimizers if call.phase == "parameter" else 1
    for call, count in counts.items():
        yield call._replace(per_iteration=count * (reductions if call.phase == "gradient" else 1))


def _reduces_twice(job: TrainingJob, pipeline_rank: int) -> bool:
    """Whether each bucket is reduced twice: with several instances of the distributed optimizer, by stages that the schedule tells
    to reduce after their last backward (`grad_sync_func` of megatron/core/pipeline_parallel/schedules.py, 0.16.1).

    These stages register no gradient in their backwards, so the first batch of `_ParamAndGradBucketGroup` never ends, and
    `finish_grad_sync` starts the reduction again. A handle of the first reduction prevents this, but several instances have none.
    The first stage registers its gradients, unless stages are interleaved.
    """
    parallel, optimizer = job.parallel, job.optimizer
    if parallel.distributed_optimizer_instances == 1 or parallel.pipeline == 1 or not job.core.has_first_batch:
        return False
    if not (optimizer.distributed and optimizer.overlap_grad_reduce and optimizer.aligned_grad_reduce):
        return False
    return pipeline_rank > 0 or parallel.virtual_pipeline is not None


def _calls(job: TrainingJob, buffer: Buffer) -> Iterator[Call]:
    """The calls for one buffer."""
    optimizer = job.optimizer
    owner = "data_parallel.experts" if buffer.group == "edp" else "data_parallel"
    if not optimizer.distributed:
        for bucket in buffer.buckets:
            yield Call(buffer.group, "all_reduce", "gradient", f"{owner}.gradients", (bucket.numel,), buffer.gradient_dtype)
        return
    instances = job.parallel.distributed_optimizer_instances
    group = f"intra_{buffer.group}" if instances > 1 else buffer.group
    ranks = reduction_size(job.parallel, buffer.group)
    reduction: Kind = "all_to_all" if optimizer.reduce_scatter_with_fp32_accumulation else "reduce_scatter"
    for bucket in buffer.buckets:
        yield Call(group, reduction, "gradient", f"{owner}.gradients", (bucket.numel,), buffer.gradient_dtype)
        if instances > 1:
            shard = (bucket.numel // ranks,)
            yield Call("inter_dist_opt", "all_reduce", "gradient", f"{owner}.gradient_shard", shard, buffer.gradient_dtype)
        yield Call(group, "all_gather", "parameter", f"{owner}.parameters", (bucket.gathered_numel,), buffer.parameter_dtype)
