"""Buffers of matrices that Muon's replicas own unsplit: each bucket has one shard per replica, and no matrix is split.

Source: megatron/core/optimizer/layer_wise_optimizer.py (`_compute_per_buffer_param_layout`, `_shard_params_from_layout`) and
param_layout.py (0.18.2 and 0.19.0). All other parameters of a chunk are in buffers of the distributed optimizer
and updated by Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import lcm
from typing import Final

from analyzer.layout.data_parallel import ReductionGroup, reduction_size
from analyzer.layout.stages import Chunk
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import PARAMETER_ALIGNMENT, Bucket, Buffer, bucket_divisor, bucket_size, chunk_buffers
from analyzer.states.buffers.matrices import OptimizerParameter, chunk_parameters
from analyzer.states.buffers.parameter_order import ParameterRun, numel_of
from analyzer.units import round_up

PADDING_FLOOR: Final = 0.9
"""A bucket stays open until it has this fraction of the elements of its largest matrix times the number of replicas."""


@dataclass(frozen=True)
class _Shards:
    """One bucket: the matrices of each replica."""

    owned: tuple[tuple[OptimizerParameter, ...], ...]
    numel: int
    """Elements of one shard, including padding."""

    @property
    def bucket(self) -> Bucket:
        """The bucket as it is communicated."""
        matrices = [weight for own in self.owned for weight in own]
        sizes = tuple(weight.numel for weight in matrices)
        return Bucket(numel_unpadded=sum(sizes), numel=self.numel * len(self.owned), sizes=sizes)


def aligned_buffers(job: TrainingJob, stage: StageModel) -> tuple[tuple[Buffer, ...], ...]:
    """Buffers of each chunk of a pipeline rank. Buffers of matrices come last."""
    chunks = []
    for index, (chunk, tree) in enumerate(zip(stage.chunks, stage.trees, strict=True)):
        size = _bucket_size(job, stage, index)
        rest = [parameter for parameter, listed in chunk_parameters(job, chunk, tree) if not listed[0].orthogonalized]
        matrices = [
            Buffer(
                parameter_dtype=job.precision.parameters,
                gradient_dtype="fp32" if job.precision.gradients == "fp32" else job.precision.parameters,
                group=group,
                buckets=tuple(shards.bucket for shards in _sharded(job, chunk, tree, group=group, size=size)),
            )
            for group in _groups(job)
        ]
        chunks.append(
            (*chunk_buffers(job, [ParameterRun(tuple(rest))], bucket_size=size), *(buffer for buffer in matrices if buffer.buckets))
        )
    return tuple(chunks)


def rest_buffers(job: TrainingJob, stage: StageModel) -> Iterator[Buffer]:
    """The buffers of the distributed optimizer, with all parameters that Muon does not orthogonalize."""
    for index, (chunk, tree) in enumerate(zip(stage.chunks, stage.trees, strict=True)):
        rest = [parameter for parameter, listed in chunk_parameters(job, chunk, tree) if not listed[0].orthogonalized]
        yield from chunk_buffers(job, [ParameterRun(tuple(rest))], bucket_size=_bucket_size(job, stage, index))


def shard_owners(job: TrainingJob, stage: StageModel, group: ReductionGroup) -> tuple[tuple[OptimizerParameter, ...], ...]:
    """Matrices that each replica of a group owns, over all chunks and buckets of a pipeline rank."""
    owned: list[list[OptimizerParameter]] = [[] for _ in range(reduction_size(job.parallel, group))]
    for index, (chunk, tree) in enumerate(zip(stage.chunks, stage.trees, strict=True)):
        for shards in _sharded(job, chunk, tree, group=group, size=_bucket_size(job, stage, index)):
            for own, more in zip(owned, shards.owned, strict=True):
                own.extend(more)
    return tuple(tuple(own) for own in owned)


def _groups(job: TrainingJob) -> tuple[ReductionGroup, ...]:
    return ("dp_cp", "edp") if job.parallel.expert > 1 else ("dp_cp",)


def _bucket_size(job: TrainingJob, stage: StageModel, index: int) -> int | None:
    numel = sum(numel_of(tree) for tree in stage.trees)
    return bucket_size(job, pipeline_rank=stage.pipeline_rank, chunk=index, rank_numel=numel)


def _sharded(job: TrainingJob, chunk: Chunk, tree: Module, *, group: ReductionGroup, size: int | None) -> tuple[_Shards, ...]:
    """Buckets of a chunk's matrices, filled in reverse order of creation."""
    ranks = reduction_size(job.parallel, group)
    listed = [weight for _, weights in chunk_parameters(job, chunk, tree) for weight in weights]
    matrices = [weight for weight in listed if weight.orthogonalized and weight.expert == (group == "edp")]
    divisor = lcm(PARAMETER_ALIGNMENT, bucket_divisor(job, ranks) // ranks)
    closed, members, numel, largest = [], list[OptimizerParameter](), 0, 0
    for weight in reversed(matrices):
        members.append(weight)
        numel, largest = numel + weight.numel, max(largest, weight.numel)
        if size is not None and numel >= max(size, int(ranks * largest * PADDING_FLOOR)):
            closed.append(packed(members, ranks=ranks, divisor=divisor))
            members, numel, largest = [], 0, 0
    if members:
        closed.append(packed(members, ranks=ranks, divisor=divisor))
    return tuple(closed)


def packed(matrices: Sequence[OptimizerParameter], *, ranks: int, divisor: int) -> _Shards:
    """Assign matrices in descending order of size, each to the smallest shard; ties go to the first shard.

    Shards are padded to the size of the largest, rounded up to a multiple of `divisor` elements.
    """
    owned: list[list[OptimizerParameter]] = [[] for _ in range(ranks)]
    ends = [(0, rank) for rank in range(ranks)]
    heapify(ends)
    longest = 0
    for weight in sorted(matrices, key=lambda weight: -weight.numel):
        end, rank = ends[0]
        end = round_up(end, PARAMETER_ALIGNMENT) + weight.numel
        heapreplace(ends, (end, rank))
        owned[rank].append(weight)
        longest = max(longest, end)
    return _Shards(owned=tuple(tuple(own) for own in owned), numel=round_up(longest, divisor))
