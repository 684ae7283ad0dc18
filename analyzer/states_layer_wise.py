"""Whole parameters shared out among replicas: who owns which, and what that makes of each rank's states.

Read in megatron/core/optimizer/layer_wise_optimizer.py (`LayerWiseDistributedOptimizer.shard_params`, `allgather_params`),
0.16.1. Gradients are all-reduced as without any sharding; after the step every rank sends what it owns to all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from analyzer.layout import coordinates, pipeline_rank_ranges
from analyzer.modules.tree import Tensor
from analyzer.results import RankRanges, StageModel
from analyzer.specs import Launch
from analyzer.states import States
from analyzer.states_muon import Weight, weights, with_owned
from analyzer.timeline import size

Owned = tuple[Weight, ...]


def owners(listed: Iterable[Weight], ranks: int) -> tuple[Owned, ...]:
    """What each of `ranks` replicas owns: parameters sorted from small to large go to them forth and back.

    Of equal sizes the one that is listed first comes first.
    """
    owned: list[list[Weight]] = [[] for _ in range(ranks)]
    loop = [*range(ranks), *reversed(range(ranks))]
    for place, weight in enumerate(sorted(listed, key=lambda weight: weight.numel)):
        owned[loop[place % len(loop)]].append(weight)
    return tuple(tuple(each) for each in owned)


def stage_owners(launch: Launch, stage: StageModel) -> tuple[tuple[Owned, ...], tuple[Owned, ...]]:
    """Owners among data-parallel ranks (with context), and among the experts' replicas."""
    listed = tuple(weights(launch, stage))
    dense = owners((weight for weight in listed if not weight.expert), launch.parallel.data_with_context)
    return dense, owners((weight for weight in listed if weight.expert), launch.parallel.expert_data)


def owned_states(launch: Launch, stage: StageModel, whole: States) -> tuple[tuple[RankRanges, States], ...]:
    """Ranks of a stage that hold equal states, with those states."""
    dense, experts = stage_owners(launch, stage)
    places: dict[tuple[int, int], list[int]] = {}
    for first, last in pipeline_rank_ranges(launch.parallel, stage.pipeline_rank):
        for rank in range(first, last + 1):
            place = coordinates(launch.parallel, rank)
            # ranks of a group stand in ascending order, context changing faster than data
            index = place.data * launch.parallel.context + place.context
            places.setdefault((index, place.expert_data if any(experts) else 0), []).append(rank)
    alike: dict[States, list[int]] = {}
    for (index, replica), ranks in places.items():
        own_experts = experts[replica] if any(experts) else ()
        held = with_owned(launch, whole, (*dense[index], *own_experts))
        gathers = [_gathering(dense, dense[index]), _gathering(experts, own_experts) if launch.parallel.expert_data > 1 else ()]
        held = replace(held, step_workspace=max(held.step_workspace, *gathers, key=size))
        alike.setdefault(held, []).extend(ranks)
    return tuple((_ranges(ranks), held) for held, ranks in alike.items())


def _gathering(shared: Sequence[Owned], own: Owned) -> tuple[Tensor, ...]:
    """What is alive while updated parameters travel: one's own in a row, and those of every rank as they come in."""
    listed = [weight for each in shared for weight in each]
    if not listed:
        return ()
    dtype = listed[0].dtype
    sent = sum(weight.numel for weight in own) if len(own) > 1 else 0  # a single one is sent as it lies
    received = sum(weight.numel for weight in listed)
    return tuple(
        Tensor(name=name, shape=(numel,), dtype=dtype, formula="parameters")
        for name, numel in (("own parameters to send", sent), ("gathered parameters", received))
    )


def _ranges(ranks: list[int]) -> RankRanges:
    """Ranks as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] + 1 == rank:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)
