"""Data-parallel messages: gradients reduced and parameters gathered, bucket by bucket.

Read in megatron/core/distributed/param_and_grad_buffer.py (`_ParamAndGradBucketGroup.start_grad_sync` and
`start_param_sync`) and reduce_scatter_with_fp32_accumulation.py, 0.16.1. Averaging in the collective, overlap with the
backward or forward pass and coalescing of the buckets of a group change neither sizes nor calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from analyzer.buffers.gradient_buffers import Buffer
from analyzer.buffers.of_stage import stage_buffers
from analyzer.communication.rows import Kind, Phase, row
from analyzer.layout.data_parallel import reduction_size
from analyzer.modules.stage import StageModel
from analyzer.results import Message
from analyzer.specs import TrainingJob


def data_parallel_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    """One row for each size of bucket; buckets of equal size, also of other chunks, are calls of the same row."""
    if job.fsdp is not None:
        from analyzer.communication.fsdp import sharding_messages  # a millisecond that most launches need not spend

        yield from sharding_messages(job, stage)
        return
    counts: Counter[tuple[str, Kind, Phase, str, int, str]] = Counter()
    held = stage_buffers(job, stage)
    for buffers in held:
        for buffer in buffers:
            counts.update(_calls(job, buffer))
    muon = job.optimizer.muon
    if not job.optimizer.overlap_param_gather and job.megatron != "2023" and muon is None:
        # dense and expert parameters have an optimizer each, and each gathers the whole chunk (`step_with_ready_grads`)
        optimizers = len({buffer.group for buffers in held for buffer in buffers})
        for call in counts:
            counts[call] *= optimizers if call[2] == "parameter" else 1
    for (group, kind, phase, module, numel, dtype), calls in counts.items():
        yield row(
            job,
            pipeline_rank=stage.pipeline_rank,
            group=group,
            kind=kind,
            phase=phase,
            module=module,
            shape=(numel,),
            dtype=dtype,
            per_iteration=calls,
        )
    if muon is not None:
        from analyzer.communication.muon import muon_messages  # a millisecond that most launches need not spend

        yield from muon_messages(job, stage)


def _calls(job: TrainingJob, buffer: Buffer) -> Iterator[tuple[str, Kind, Phase, str, int, str]]:
    """(group, kind, phase, module, elements, dtype) of each call for one buffer."""
    optimizer = job.optimizer
    owner = "data_parallel.experts" if buffer.group == "edp" else "data_parallel"
    if not optimizer.distributed:
        for bucket in buffer.buckets:
            yield buffer.group, "all_reduce", "gradient", f"{owner}.gradients", bucket.numel, buffer.gradient_dtype
        return
    instances = job.parallel.distributed_optimizer_instances
    group = f"intra_{buffer.group}" if instances > 1 else buffer.group
    ranks = reduction_size(job.parallel, buffer.group)
    reduction: Kind = "all_to_all" if optimizer.reduce_scatter_with_fp32_accumulation else "reduce_scatter"
    for bucket in buffer.buckets:
        yield group, reduction, "gradient", f"{owner}.gradients", bucket.numel, buffer.gradient_dtype
        if instances > 1:
            shard = bucket.numel // ranks
            yield "inter_dist_opt", "all_reduce", "gradient", f"{owner}.gradient_shard", shard, buffer.gradient_dtype
        yield group, "all_gather", "parameter", f"{owner}.parameters", bucket.numel, buffer.parameter_dtype
