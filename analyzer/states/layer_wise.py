"""Whole parameters shared out among replicas: who owns which, and what that makes of each rank's states.

Read in megatron/core/optimizer/layer_wise_optimizer.py (`LayerWiseDistributedOptimizer.shard_params`, `allgather_params`),
0.16.1. Gradients are all-reduced as without any sharding; after the step every rank sends what it owns to all others. From 0.18
on buffers may be laid out by owner (`buffers_layer_wise`), and what is no matrix is sharded by the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analyzer.buffers.gradient_buffers import shard_numel
from analyzer.buffers.layer_wise import rest_buffers, shard_owners
from analyzer.buffers.matrices import OptimizerParameter, weights
from analyzer.layout.data_parallel import reduction_size
from analyzer.layout.groups import RankRanges
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.muon import muon_of, with_owned
from analyzer.states.record import States
from analyzer.states.replicas import alike_ranks

Owned = tuple[OptimizerParameter, ...]


def owners(listed: Iterable[OptimizerParameter], ranks: int) -> tuple[Owned, ...]:
    """What each of `ranks` replicas owns: parameters sorted from small to large go to them forth and back.

    Of equal sizes the one that is listed first comes first.
    """
    owned: list[list[OptimizerParameter]] = [[] for _ in range(ranks)]
    loop = [*range(ranks), *reversed(range(ranks))]
    for place, weight in enumerate(sorted(listed, key=lambda weight: weight.numel)):
        owned[loop[place % len(loop)]].append(weight)
    return tuple(tuple(each) for each in owned)


def stage_owners(job: TrainingJob, stage: StageModel) -> tuple[tuple[Owned, ...], tuple[Owned, ...]]:
    """Owners among data-parallel ranks (with context), and among the experts' replicas."""
    if muon_of(job).aligned:
        return shard_owners(job, stage, "dp_cp"), shard_owners(job, stage, "edp") if job.parallel.expert > 1 else ((),)
    listed = tuple(weights(job, stage))
    dense = owners((weight for weight in listed if not weight.expert), job.parallel.data_with_context)
    return dense, owners((weight for weight in listed if weight.expert), job.parallel.expert_data)


def owned_states(job: TrainingJob, stage: StageModel, whole: States) -> tuple[tuple[RankRanges, States], ...]:
    """Ranks of a stage that hold equal states, with those states."""
    dense, experts = stage_owners(job, stage)
    if muon_of(job).aligned:
        rest = sum(shard_numel(buffer, reduction_size(job.parallel, buffer.group)) for buffer in rest_buffers(job, stage))
        return alike_ranks(
            job.parallel,
            stage.pipeline_rank,
            dense=dense,
            experts=experts,
            made_of=lambda own, own_experts: with_owned(job, whole, (*own, *own_experts), adams_shard=rest),
        )
    in_dense = _gathered(dense)
    in_experts = _gathered(experts) if job.parallel.expert_data > 1 else ()

    def made_of(own: Owned, own_experts: Owned) -> States:
        held = with_owned(job, whole, (*own, *own_experts))
        gathering = max(_sent(own, in_dense), _sent(own_experts, in_experts), key=total_bytes)  # after all steps
        return replace(
            held,
            step_workspace=max(held.step_workspace, gathering, key=total_bytes),
            first_step_bytes=max(held.first_step_bytes, total_bytes(gathering)),
        )

    return alike_ranks(job.parallel, stage.pipeline_rank, dense=dense, experts=experts, made_of=made_of)


def _gathered(shared: Sequence[Owned]) -> tuple[Tensor, ...]:
    """Updated parameters of every rank, as they come in; where all own equally much, by way of one tensor for all.

    Parts of equal size are copied out of a stacked tensor, others broadcast one by one (`ProcessGroupNCCL::allgather`).
    """
    listed = [weight for each in shared for weight in each]
    if not listed:
        return ()
    numels = [sum(weight.numel for weight in each) for each in shared]
    arriving = Tensor(name="gathered parameters", shape=(sum(numels),), dtype=listed[0].dtype, formula="parameters")
    return (arriving, replace(arriving, name="stacked parameters")) if len(set(numels)) == 1 else (arriving,)


def _sent(own: Owned, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Beside what comes in, one's own in a row; a single one is sent as it lies."""
    numel = sum(weight.numel for weight in own) if len(own) > 1 else 0
    return (*received, *(replace(tensor, name="own parameters to send", shape=(numel,)) for tensor in received[:1]))
