"""Communication of FSDP: parameters gathered and gradients reduced, bucket by bucket or unit by unit.

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (`AllGatherPipeline.all_gather_params`,
`GradReducePipeline._bucket_group_gradient_reduce`), 0.16.1, and torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
(torch 2.13). Coalesced calls are counted one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from analyzer.communication.calls import Call, Kind, Phase
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import ShardedBucket, fsdp_of, reduced_dtype, shard_ranks, sharded_buckets
from analyzer.states.buffers.fsdp2 import torch_units
from analyzer.states.buffers.fsdp_gathering import chunk_passes


def fsdp_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """One call for each kind and size of message, with the number of equal buckets, also those of other chunks."""
    of_chunk = _torch_calls if fsdp_of(job).implementation == "torch" else _megatron_calls
    each_microbatch: Counter[Call] = Counter()
    each_iteration: Counter[Call] = Counter()
    for tree in stage.trees:
        for call, per_microbatch, per_iteration in of_chunk(job, tree):
            each_microbatch[call] += per_microbatch
            each_iteration[call] += per_iteration
    for call in each_microbatch + each_iteration:  # without calls that are never made
        yield call._replace(per_microbatch=each_microbatch[call], per_iteration=each_iteration[call])


def _megatron_calls(job: TrainingJob, tree: Module) -> Iterator[tuple[Call, int, int]]:
    """Calls of one chunk, with their number for each microbatch and for each iteration.

    Sharded gradients are reduced in every microbatch, others in the last. Layers with sharded parameters are gathered for the
    forward and for the backward; everything else is gathered once, after the step.
    """
    strategy = fsdp_of(job).strategy
    buckets = sharded_buckets(job, tree)
    passes = chunk_passes(job, tree, buckets)
    for number, bucket in enumerate(buckets):
        gradients = reduced_dtype(job, bucket)
        kind: Kind = "all_reduce" if strategy == "no_shard" else "reduce_scatter"
        each = strategy in ("optim_grads", "optim_grads_params")
        yield _call(job, bucket, kind, "gradient", gradients), int(each), int(not each)
        if strategy != "no_shard":
            if bucket.unit is None or strategy != "optim_grads_params":
                yield _call(job, bucket, "all_gather", "parameter", bucket.dtype), 0, 1
            else:
                yield _call(job, bucket, "all_gather", "forward", bucket.dtype), passes.gathered_forward[number], 0
                yield _call(job, bucket, "all_gather", "backward", bucket.dtype), passes.gathered_backward[number], 0
        gathered = passes.gathered_forward[number] + passes.gathered_backward[number]
        yield from _outer_calls(
            job, bucket, gathered=gathered if strategy == "optim_grads_params" and bucket.unit is not None else 1
        )


def _call(job: TrainingJob, bucket: ShardedBucket, kind: Kind, phase: Phase, dtype: str) -> Call:
    """A collective over a bucket."""
    group = f"intra_{bucket.group}" if job.parallel.distributed_optimizer_instances > 1 else bucket.group
    name = _name(bucket, "gradients" if phase == "gradient" else "parameters")
    return Call(group, kind, phase, name, (bucket.numel,), dtype)


def _outer_calls(job: TrainingJob, bucket: ShardedBucket, *, gathered: int) -> Iterator[tuple[Call, int, int]]:
    """Between instances of the optimizer: gradients once for each iteration, and parameters if the instances own different ones.

    MegatronFSDP reduces gradients between instances in the last microbatch, which its `no_sync` announces. Training calls `no_sync`
    only with `--overlap-grad-reduce` (`train`, megatron/training/training.py, 0.16.1). Before each of the `gathered` gathers of a
    bucket in the first microbatch, it is gathered between instances (`all_gather_and_wait_parameters_ready`).
    """
    if job.parallel.distributed_optimizer_instances == 1:
        return
    fsdp = fsdp_of(job)
    sharded = fsdp.strategy in ("optim_grads", "optim_grads_params")
    numel = bucket.numel // shard_ranks(job, bucket.group) if sharded else bucket.numel
    reduction: Kind = "reduce_scatter" if fsdp.outer_sharding else "all_reduce"
    gradients = reduced_dtype(job, bucket)
    if job.optimizer.overlap_grad_reduce:
        yield Call("inter_dist_opt", reduction, "gradient", _name(bucket, "gradient_shard"), (numel,), gradients), 0, 1
    if fsdp.outer_sharding:
        yield (
            Call("inter_dist_opt", "all_gather", "parameter", _name(bucket, "parameter_shard"), (numel,), bucket.dtype),
            0,
            gathered,
        )


def _name(bucket: ShardedBucket, what: str) -> str:
    return f"data_parallel.experts.{what}" if bucket.expert else f"data_parallel.{what}"


def _torch_calls(job: TrainingJob, tree: Module) -> Iterator[tuple[Call, int, int]]:
    """Every unit is gathered and reduced in every microbatch, and gathered again for backward if forward freed it.

    MTP layers call the embedding and the output layer again. Forward frees a unit after each call. Backward frees the output layer
    after each call, but the embedding, whose input has no gradient, only after the last.
    """
    again = int(fsdp_of(job).reshard_after_forward)
    for unit in torch_units(job, tree):
        calls = 1 + job.model.mtp_num_layers if unit.kind in (ModuleKind.EMBEDDING, ModuleKind.OUTPUT_LAYER) else 1
        freed = calls - 1 + again if unit.kind is ModuleKind.OUTPUT_LAYER else again
        forward = calls if again else 1
        yield Call("dp_cp", "all_gather", "forward", "data_parallel.parameters", (unit.numel,), unit.dtype), forward, 0
        yield Call("dp_cp", "all_gather", "backward", "data_parallel.parameters", (unit.numel,), unit.dtype), freed, 0
        yield Call("dp_cp", "reduce_scatter", "gradient", "data_parallel.gradients", (unit.reduced,), unit.dtype), 1, 0
