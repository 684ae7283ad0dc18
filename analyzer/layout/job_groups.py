"""Process groups of a job: the number of their ranks, and how many of these NVLink connects."""

from __future__ import annotations

from math import ceil, prod
from typing import Final

from analyzer.layout.groups import DENSE_GROUPS, EXPERT_GROUPS, axes_of, group_size
from analyzer.layout.stages import mtp_rank
from analyzer.specs import ParallelSpec, TrainingJob

RACK: Final = 64
"""GPUs of an NVL72 rack that a job with several racks uses: sixteen nodes of four, so that sizes are powers of two."""


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


def domain_size(parallel: ParallelSpec, nvlink_domain: int) -> int:
    """GPUs of the launch in one NVLink domain: those of a node, or of a rack. `nvlink_domain`: those that NVLink can connect."""
    node, domain = parallel.gpus_per_node, nvlink_domain
    if domain <= 8:
        return min(node, domain) if domain > 1 else 1
    if parallel.world_size <= domain:
        return parallel.world_size
    return RACK if parallel.world_size % RACK == 0 else domain // node * node


def ranks_near(parallel: ParallelSpec, group: str, domain: int) -> int:
    """Ranks of the first group of a kind in the NVLink domain of rank 0, which has `domain` GPUs.

    `group`: a kind of `DENSE_GROUPS` or `EXPERT_GROUPS`; every other one is assumed to have consecutive ranks.
    """
    if group not in DENSE_GROUPS and group not in EXPERT_GROUPS:
        return min(parallel.world_size, domain)
    return prod(min(axis.size, ceil(domain / axis.stride)) for axis in axes_of(parallel, group))
