"""Layer-wise optimizer: full parameters are distributed over replicas. Owners of parameters, and model states of each rank.

Source: megatron/core/optimizer/layer_wise_optimizer.py (`LayerWiseDistributedOptimizer.shard_params`, `allgather_params`),
0.16.1. Gradients are all-reduced as without sharding. After the step every rank sends the parameters it owns to all others.
From 0.18 on, buffers may be laid out by owner (`buffers.layer_wise`); parameters that are not matrices are then sharded by
the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analyzer.layout.data_parallel import reduction_size
from analyzer.layout.groups import RankRanges
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import shard_numel
from analyzer.states.buffers.layer_wise import rest_buffers, shard_owners
from analyzer.states.buffers.matrices import OptimizerParameter, weights
from analyzer.states.muon import muon_of, with_owned
from analyzer.states.record import States
from analyzer.states.replicas import group_by_states

Owned = tuple[OptimizerParameter, ...]


def owners(listed: Iterable[OptimizerParameter], ranks: int) -> tuple[Owned, ...]:
    """Parameters of each of `ranks` replicas: sorted by ascending size and assigned to the ranks in order, then in reverse order.

    Parameters of equal size keep their order.
    """
    owned: list[list[OptimizerParameter]] = [[] for _ in range(ranks)]
    loop = [*range(ranks), *reversed(range(ranks))]
    for index, weight in enumerate(sorted(listed, key=lambda weight: weight.numel)):
        owned[loop[index % len(loop)]].append(weight)
    return tuple(tuple(each) for each in owned)


def stage_owners(job: TrainingJob, stage: StageModel) -> tuple[tuple[Owned, ...], tuple[Owned, ...]]:
    """Owners among data-parallel ranks (with context parallelism), and among the data-parallel ranks of experts."""
    if muon_of(job).aligned:
        return shard_owners(job, stage, "dp_cp"), shard_owners(job, stage, "edp") if job.parallel.expert > 1 else ((),)
    listed = tuple(weights(job, stage))
    dense = owners((weight for weight in listed if not weight.expert), job.parallel.data_with_context)
    return dense, owners((weight for weight in listed if weight.expert), job.parallel.expert_data)


def owned_states(job: TrainingJob, stage: StageModel, states: States) -> tuple[tuple[RankRanges, States], ...]:
    """Groups of ranks of a stage with equal model states, with these states. `states`: those of a rank that owns everything."""
    dense, experts = stage_owners(job, stage)
    if muon_of(job).aligned:
        rest = sum(shard_numel(buffer, reduction_size(job.parallel, buffer.group)) for buffer in rest_buffers(job, stage))
        return group_by_states(
            job.parallel,
            stage.pipeline_rank,
            dense=dense,
            experts=experts,
            states_of=lambda own, own_experts: with_owned(job, states, (*own, *own_experts), adam_numel=rest),
        )
    in_dense = _gathered(dense)
    in_experts = _gathered(experts) if job.parallel.expert_data > 1 else ()

    def states_of(own: Owned, own_experts: Owned) -> States:
        own_states = with_owned(job, states, (*own, *own_experts))
        sent = (_sent(job, own, in_dense), _sent(job, own_experts, in_experts))
        gathering = max(sent, key=total_bytes)  # after the steps of all parameters
        return replace(
            own_states,
            step_workspace=max(own_states.step_workspace, gathering, key=total_bytes),
            first_step_bytes=max(own_states.first_step_bytes, total_bytes(gathering)),
        )

    return group_by_states(job.parallel, stage.pipeline_rank, dense=dense, experts=experts, states_of=states_of)


def _gathered(shared: Sequence[Owned]) -> tuple[Tensor, ...]:
    """Received parameters of all ranks and, if all ranks own equally many elements, the stacked tensor that receives them.

    Parts of equal size are copied out of a stacked tensor. Others are broadcast one by one (`ProcessGroupNCCL::allgather`).
    """
    listed = [weight for each in shared for weight in each]
    if not listed:
        return ()
    numels = [sum(weight.numel for weight in each) for each in shared]
    received = Tensor(name="gathered parameters", shape=(sum(numels),), dtype=listed[0].dtype, formula="parameters")
    return (received, replace(received, name="stacked parameters")) if len(set(numels)) == 1 else (received,)


def _sent(job: TrainingJob, own: Owned, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`received`, and a flat copy of the own parameters. A single own parameter is sent without a copy.

    Whether the rank receives its own parameters depends on the release.
    """
    if not received:
        return ()
    numel = sum(weight.numel for weight in own)
    first, *stacked = received
    sending = replace(first, name="own parameters to send", shape=(numel if len(own) > 1 else 0,))
    if not job.core.layer_wise_receives_own:
        first = replace(first, shape=(first.shape[0] - numel,))
    return (first, *stacked, sending)
