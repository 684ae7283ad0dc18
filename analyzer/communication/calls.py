"""A call of a rank, and the ranks of its group."""

from __future__ import annotations

from typing import Literal, NamedTuple

from analyzer.layout.groups import group_size
from analyzer.layout.stages import mtp_rank
from analyzer.specs import TrainingJob

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast"]
Phase = Literal["forward", "backward", "recompute", "gradient", "parameter"]


class Call(NamedTuple):
    """A collective or a point-to-point message of one rank."""

    group: str
    kind: Kind
    phase: Phase
    module: str
    """Path of the module, or the name of what is communicated."""
    shape: tuple[int, ...]
    dtype: str
    per_microbatch: int = 0
    """Calls for each microbatch."""
    per_iteration: int = 0
    """Further calls for each iteration."""
    peer: str = ""
    """Of a point-to-point message: 'next' or 'previous' pipeline rank."""
    batched: bool = False
    """Of a point-to-point message: issued with others by batch_isend_irecv."""


def ranks_in_group(job: TrainingJob, group: str) -> int:
    """Ranks of `group`, one of `layout.GROUP_KINDS` or a part of dp_cp, edp or cp.

    `intra_dp_cp`, `intra_edp` and `inter_dist_opt` exist with several instances of the distributed optimizer: the ranks of one
    instance, and those with the same shard in each (megatron/core/parallel_state.py, 0.16.1). `cp_a2a` and `cp_p2p` exist with
    hierarchical context parallelism: inner groups, and ranks with the same index in each.
    """
    instances = job.parallel.distributed_optimizer_instances
    if group in ("cp_a2a", "cp_p2p"):
        inner = job.parallel.cp_inner_size
        return inner if group == "cp_a2a" else job.parallel.context // inner
    if group == "inter_dist_opt":
        return instances
    if group == "world":
        return job.parallel.world_size
    if group in ("intra_dp_cp", "intra_edp"):
        return group_size(job.parallel, group.removeprefix("intra_")) // instances
    return group_size(job.parallel, group, tied=job.model.tied_embeddings, mtp_rank=mtp_rank(job.model, job.parallel))


def gradient_statistics_group(job: TrainingJob, *, experts: bool = False) -> str:
    """The group over which gradient norm, overflow and zeros are reduced; with `experts`, those of expert gradients.

    It spans every shard of the gradients: model-parallel ranks, or with the distributed optimizer all ranks of one of its instances
    (`_get_megatron_optimizer_based_on_param_groups`, megatron/core/optimizer/__init__.py, 0.16.1), or in early releases all ranks
    (`CoreBehavior.statistics_of_all_ranks`). With the layer-wise optimizer it is the world
    (`LayerWiseDistributedOptimizer.get_grad_norm`).
    """
    muon = job.optimizer.muon
    if muon is not None and muon.layer_wise:
        return "world"
    if job.optimizer.distributed:
        return "world" if job.core.statistics_of_all_ranks else "intra_dist_opt"
    return "tp_ep_pp" if experts else "mp"
