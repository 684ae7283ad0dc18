"""What the reduction of a bucket of Megatron-FSDP allocates: the shard of the reduced gradients.

It is allocated when the last gradient of the bucket is accumulated, while the bucket is allocated. It is freed when it has been
added to the gradients of this rank.

Source: `GradReducePipeline._bucket_group_gradient_reduce` in
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.buffers.fsdp import ShardedBucket, fsdp_of, is_segment, of_one_expert, reduced_dtype, shard_ranks
from analyzer.buffers.fsdp_gathering import Gathering
from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.passes.fsdp_gradients import beyond_freed
from analyzer.specs import TrainingJob

REDUCED = "reduced gradients"


def with_reduced_shards(gathering: Gathering, tree: Module) -> Module:
    """The tree in which the module that computes the last gradient of a bucket has its shard.

    With `--fsdp-double-buffer` the shard is a part of the bucket.
    """
    fsdp = fsdp_of(gathering.job)
    if fsdp.double_buffer or fsdp.strategy not in ("optim_grads", "optim_grads_params"):
        return tree
    completed: dict[int, list[ShardedBucket]] = {}
    for bucket, used in zip(gathering.buckets, gathering.accumulating, strict=True):
        if used and shard_ranks(gathering.job, bucket.group) > 1:
            completed.setdefault(min(used), []).append(bucket)
    indices = iter(range(len(gathering.all_segments)))

    def visit(module: Module) -> Module:
        if is_segment(module):
            for bucket in completed.get(next(indices), ()):
                module, _ = _with_shard(gathering.job, module, bucket, frozenset(map(of_one_expert, bucket.parameters)))
            return module
        return replace(module, children=tuple(visit(child) for child in module.children))

    return visit(tree)


def _with_shard(job: TrainingJob, module: Module, bucket: ShardedBucket, parameters: frozenset[Parameter]) -> tuple[Module, bool]:
    """The module in which the first part with parameters of the bucket has the shard, and whether there is one."""
    if not parameters.isdisjoint(map(of_one_expert, module.parameters)):
        shard = beyond_freed((_shard(job, bucket),), module)
        return (replace(module, backward_workspace=(*module.backward_workspace, *shard)) if shard else module), True
    for index, child in enumerate(module.children):
        changed, found = _with_shard(job, child, bucket, parameters)
        if found:
            if changed is child:
                return module, True
            return replace(module, children=(*module.children[:index], changed, *module.children[index + 1 :])), True
    return module, False


def _shard(job: TrainingJob, bucket: ShardedBucket) -> Tensor:
    numel = bucket.numel // shard_ranks(job, bucket.group)
    return Tensor(name=REDUCED, shape=(numel,), dtype=reduced_dtype(job, bucket), formula="bucket / ranks")
