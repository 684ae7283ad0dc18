"""What the reduction of a bucket of Megatron-FSDP allocates: the shard of the reduced gradients.

It is allocated when the last gradient of the bucket is accumulated, while the bucket is allocated. It is freed when it has been
added to the gradients of this rank.

Source: `GradReducePipeline._bucket_group_gradient_reduce` in
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (0.16.1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from analyzer.modules.tree import Module, Parameter, Tensor
from analyzer.passes.fsdp_gradients import beyond_freed, in_segment
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import ShardedBucket, fsdp_of, is_segment, of_one_expert, reduced_dtype, shard_ranks
from analyzer.states.buffers.fsdp_gathering import Gathering

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
            index = next(indices)
            for bucket in completed.get(index, ()):
                earlier = gathering.buckets[: gathering.buckets.index(bucket)]
                equal = Counter(one for each in earlier if each.unit == bucket.unit for one in in_segment(each, index))
                left = _Left({one: equal[one] for one in in_segment(bucket, index)})
                module = _with_shard(gathering.job, module, bucket, left)
            return module
        return replace(module, children=tuple(visit(child) for child in module.children))

    return visit(tree)


class _Left:
    """Parameters of a bucket, in a search for the first module that has one of them.

    `earlier`: for each parameter, the number of equal ones in earlier buckets, which the search comes to first.
    """

    def __init__(self, earlier: dict[Parameter, int]) -> None:
        self._earlier = earlier
        self.found = False

    def find(self, module: Module) -> bool:
        """Whether this is that module."""
        for parameter in module.parameters:
            one = of_one_expert(parameter)
            if one in self._earlier:
                self._earlier[one] -= parameter.pieces
                self.found = self.found or self._earlier[one] < 0
        return self.found


def _with_shard(job: TrainingJob, module: Module, bucket: ShardedBucket, left: _Left) -> Module:
    """The module in which the first part with parameters of the bucket has the shard."""
    if left.find(module):
        shard = beyond_freed((_shard(job, bucket),), module, last=True)
        return replace(module, backward_workspace=(*module.backward_workspace, *shard)) if shard else module
    for index, child in enumerate(module.children):
        changed = _with_shard(job, child, bucket, left)
        if left.found:
            if changed is child:
                return module
            return replace(module, children=(*module.children[:index], changed, *module.children[index + 1 :]))
    return module


def _shard(job: TrainingJob, bucket: ShardedBucket) -> Tensor:
    numel = bucket.numel // shard_ranks(job, bucket.group)
    return Tensor(name=REDUCED, shape=(numel,), dtype=reduced_dtype(job, bucket), formula="bucket / ranks")
