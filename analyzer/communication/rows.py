"""How a row of the communication table is made, and how many ranks take part in it."""

from __future__ import annotations

from math import prod
from typing import Literal

from analyzer.layout.groups import group_size
from analyzer.layout.stages import mtp_rank
from analyzer.results import Message
from analyzer.specs import TrainingJob
from analyzer.units import dtype_bytes

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast"]
Phase = Literal["forward", "backward", "recompute", "gradient", "parameter"]


def row(
    job: TrainingJob,
    *,
    pipeline_rank: int,
    group: str,
    kind: Kind,
    phase: Phase,
    module: str,
    shape: tuple[int, ...],
    dtype: str,
    per_microbatch: int = 0,
    per_iteration: int = 0,
    peer: str = "",
    batched: bool = False,
) -> Message:
    """A message that one rank issues `per_microbatch` times for each microbatch, or `per_iteration` times in all."""
    message_bytes = dtype_bytes(dtype, prod(shape))
    calls = per_microbatch * job.batch.microbatches + per_iteration
    return Message(
        group=group,
        kind=kind,
        phase=phase,
        module=module,
        pipeline_rank=pipeline_rank,
        shape=shape,
        dtype=dtype,
        message_bytes=message_bytes,
        calls_per_microbatch=per_microbatch,
        calls_per_iteration=calls,
        bytes_per_iteration=calls * message_bytes,
        peer=peer,
        batched=batched,
    )


def ranks_in_group(job: TrainingJob, group: str) -> int:
    """Ranks that share a message over `group`, one of `layout.GROUP_KINDS` or a part of dp_cp, edp or cp.

    `intra_dp_cp`, `intra_edp` and `inter_dist_opt` exist with several instances of the distributed optimizer: the
    ranks of one instance, and those that hold the same shard in each (megatron/core/parallel_state.py, 0.16.1);
    `cp_a2a` and `cp_p2p` with hierarchical context parallelism: inner groups, and ranks of equal place in each.
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
    """The group over which gradient norm, overflow and zeros are summed, those of `experts` if so.

    It spans every shard of the gradients: model parallel ranks, or with the distributed optimizer all ranks of an
    instance of it (`_get_megatron_optimizer_based_on_param_groups`, megatron/core/optimizer/__init__.py, 0.16.1; all
    ranks in 2023). Where whole parameters are shared out, it is the world (`LayerWiseDistributedOptimizer.get_grad_norm`).
    """
    muon = job.optimizer.muon
    shared_out = muon is not None and muon.layer_wise
    if shared_out:
        return "world"
    if job.optimizer.distributed:
        return "intra_dist_opt"
    return "tp_ep_pp" if experts else "mp"
