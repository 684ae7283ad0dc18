"""Model states of a rank with Megatron-FSDP.

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py
(`_init_each_parameter_group_buffers`, `update_main_grads`) and megatron/core/optimizer/__init__.py, 0.16.1. Every
parameter has an fp32 master weight and moments. Bytes of parameters, gradients and master weights, which are in buffers, are
those of a full shard with its padding; moments are those of the first replica or, with ring attention, of the last in its ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, parameters
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import (
    ShardedBucket,
    described_shard,
    fsdp_of,
    gradient_dtype,
    padding_ranks,
    shard_ranks,
    sharded_buckets,
    stored_dtype,
)
from analyzer.states.buffers.fsdp_gathering import gathered_after_step
from analyzer.states.bytes_per_parameter import FP32, casts_to_stored_fp8
from analyzer.states.record import States
from analyzer.units import BLOCK, dtype_bytes, round_up


def sharded_states(job: TrainingJob, stage: StageModel) -> States:
    """Model states of one rank of a pipeline stage."""
    chunks = [sharded_buckets(job, tree) for tree in stage.trees]
    buckets = [bucket for chunk in chunks for bucket in chunk]
    fsdp = fsdp_of(job)
    owned = tuple(_bytes_in_fp32(described_shard(job, bucket)) for bucket in buckets)
    by_dtype: dict[str, int] = {}
    for bucket in buckets:
        dtype = gradient_dtype(job, bucket)
        by_dtype[dtype] = by_dtype.get(dtype, 0) + _gradient_numel(job, bucket)
    gathered = sum(gathered_after_step(job, chunk, tree) for chunk, tree in zip(chunks, stage.trees, strict=True))
    casts = [_cast_bytes(job, [bucket for bucket in buckets if bucket.expert is expert]) - gathered for expert in (False, True)]
    moments = len(job.optimizer.state_dtypes)
    of_experts = moments * sum(size for bucket, size in zip(buckets, owned, strict=True) if bucket.expert)
    copied = sum(size for bucket, size in zip(buckets, owned, strict=True) if gradient_dtype(job, bucket) != "fp32")
    return States(
        parameters=sum(_parameter_bytes(job, bucket) for bucket in buckets),
        gradients=sum(round_up(dtype_bytes(dtype, numel), BLOCK) for dtype, numel in by_dtype.items()),
        master_weights=sum(round_up(FP32 * owned_numel(job, bucket), BLOCK) for bucket in buckets),
        moments=moments * sum(owned),
        gradient_copies=copied,
        moments_from_start=fsdp.moments_from_start,
        gathered=gathered,
        at_start=0 if fsdp.starts_from_meta else _at_start(job, stage, buckets),
        step_workspace=(Tensor(name="16-bit copies of master weights", shape=(max(0, *casts),), dtype="uint8"),),
        first_step_bytes=max(0, casts[0] - of_experts, casts[1]),
    )


def _cast_bytes(job: TrainingJob, buckets: Sequence[ShardedBucket]) -> int:
    """Bytes of 16-bit copies of the master weights of one optimizer, from which stored FP8 weights are cast.

    Experts have an optimizer of their own, whose step comes last. Then parameters are gathered.
    Source: `cast_master_weights_to_fp8` (transformer_engine/pytorch/tensor/utils.py, 2.11).
    """
    if not casts_to_stored_fp8(job):
        return 0
    stored = (bucket for bucket in buckets if bucket.dtype == "fp8")
    dtype = job.precision.parameters
    return sum(round_up(dtype_bytes(dtype, numel), BLOCK) for bucket in stored for numel in described_shard(job, bucket))


def owned_numel(job: TrainingJob, bucket: ShardedBucket) -> int:
    """Elements of a bucket whose fp32 master weights and moments one rank stores."""
    if fsdp_of(job).strategy == "no_shard":
        return bucket.numel
    return bucket.numel // padding_ranks(job, bucket.group)


def _bytes_in_fp32(numels: Sequence[int]) -> int:
    """Bytes of one fp32 tensor for each parameter of a shard. Padding is in none of them."""
    return sum(round_up(FP32 * numel, BLOCK) for numel in numels)


def _parameter_bytes(job: TrainingJob, bucket: ShardedBucket) -> int:
    strategy = fsdp_of(job).strategy
    if strategy == "no_shard":  # parameters keep their original allocations
        return sum(round_up(dtype_bytes(bucket.dtype, parameter.numel), BLOCK) for parameter in bucket.parameters)
    ranks = shard_ranks(job, bucket.group) if strategy == "optim_grads_params" else 1
    return round_up(dtype_bytes(bucket.dtype, bucket.numel // ranks), BLOCK)


def _gradient_numel(job: TrainingJob, bucket: ShardedBucket) -> int:
    sharded = fsdp_of(job).strategy in ("optim_grads", "optim_grads_params")
    return bucket.numel // shard_ranks(job, bucket.group) if sharded else bucket.numel


def _at_start(job: TrainingJob, stage: StageModel, buckets: Sequence[ShardedBucket]) -> int:
    """Peak while the model is sharded: the unsharded parameters are on the GPU and are freed bucket by bucket."""
    unsharded = sum(
        round_up(dtype_bytes(stored_dtype(job, parameter), parameter.numel), BLOCK)
        for tree in stage.trees
        for parameter in parameters(tree)
    )
    strategy = fsdp_of(job).strategy
    created = peak = 0
    for bucket in buckets:
        created += round_up(FP32 * owned_numel(job, bucket), BLOCK)
        if strategy == "no_shard":
            peak = max(peak, unsharded + created)
            continue
        created += _parameter_bytes(job, bucket)
        gathered = round_up(dtype_bytes(bucket.dtype, bucket.numel), BLOCK) if strategy == "optim_grads_params" else 0
        peak = max(peak, unsharded + created + gathered)
        unsharded -= sum(round_up(dtype_bytes(bucket.dtype, parameter.numel), BLOCK) for parameter in bucket.parameters)
    return peak
