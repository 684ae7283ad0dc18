"""Megatron's process groups on one rank, without the other ranks of the world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from allocator_hook.step.config import hierarchy, transformer_config
from allocator_hook.step.patching import Patch, Patches
from allocator_hook.step.versions import known_to
from analyzer.errors import AnalyzerError
from analyzer.specs import TrainingJob


@dataclass(frozen=True)
class GroupInfo:
    """The name of a process group in traces and reports, and its global ranks."""

    name: str
    members: tuple[int, ...]


def initialize(job: TrainingJob, *, rank: int, seed: int = 1234) -> None:
    """Initialize torch.distributed with the fake backend, then Megatron's groups and RNG states as `initialize_megatron` does."""
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel = job.parallel
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    # releases before 0.11 always create the groups for the CPU
    with Patches(
        (Patch(dist, "new_group", _on_gpu(dist.new_group), "there are no peers that a group for the CPU could connect to"),)
    ):
        parallel_state.initialize_model_parallel(**_sizes(job))
    tracker = {} if job.graphs is None else {"te_rng_tracker": job.model.implementation == "transformer_engine"}
    graphed = {} if job.graphs is None else {"use_cudagraphable_rng": True}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, **tracker, **graphed)


def _on_gpu(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, backend=None, **options: real(*args, backend="fake" if backend == "gloo" else backend, **options)


def _sizes(job: TrainingJob) -> dict[str, Any]:
    from megatron.core import parallel_state

    parallel = job.parallel
    return known_to(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        hierarchical_context_parallel_sizes=hierarchy(job),
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=None if parallel.expert_tensor == parallel.tensor else parallel.expert_tensor,
        num_distributed_optimizer_instances=parallel.distributed_optimizer_instances,
        order=parallel.order,
        create_gloo_process_groups=False,
        **_embedding_ranks(job),
    )


def _embedding_ranks(job: TrainingJob) -> dict[str, Any]:
    """Return the option for the pipeline ranks with a word embedding: `get_embedding_ranks` of pretrain_gpt.py (core 0.16)."""
    try:
        from megatron.core.transformer import multi_token_prediction
    except ImportError:  # before 0.12
        return {}
    if not hasattr(multi_token_prediction, "get_mtp_ranks"):
        return {}

    def embedding_ranks(pipeline: list[int], split_rank: int | None = None) -> list[int]:
        del split_rank
        holders = {pipeline[0]}
        if len(pipeline) > 1 and job.model.tied_embeddings:
            holders.add(pipeline[-1])
        if len(pipeline) > 1 and job.model.mtp_num_layers:
            holders.update(multi_token_prediction.get_mtp_ranks(pipeline, transformer_config(job)))
        return sorted(holders)

    return {"get_embedding_ranks": embedding_ranks}


def named_groups() -> dict[Any, GroupInfo]:
    """Return every group of this rank. Groups with equal members stay distinct, because Megatron creates them separately."""
    return {group: GroupInfo(name, tuple(dist.get_process_group_ranks(group))) for name, group in _groups() if group is not None}


def _groups() -> Iterator[tuple[str, Any]]:
    from megatron.core import parallel_state as mpu

    # general groups come before special ones: if Megatron uses one group under two names, the later name is used
    calls: list[tuple[str, str, dict[str, bool]]] = [
        ("mp", "get_model_parallel_group", {}),
        ("tp_cp", "get_tensor_and_context_parallel_group", {}),
        ("tp_dp_cp", "get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
        ("tp_ep_pp", "get_expert_tensor_model_pipeline_parallel_group", {}),
        ("tp_ep", "get_expert_tensor_and_model_parallel_group", {}),
        ("intra_edp", "get_expert_data_parallel_group", {"partial_expert_data_parallel": True}),
        ("edp", "get_expert_data_parallel_group", {}),
        ("etp", "get_expert_tensor_parallel_group", {}),
        ("ep", "get_expert_model_parallel_group", {}),
        ("pos_embd", "get_position_embedding_group", {}),
        ("embd", "get_embedding_group", {}),
        ("intra_dp_cp", "get_data_parallel_group", {"with_context_parallel": True, "partial_data_parallel": True}),
        ("inter_dist_opt", "get_inter_distributed_optimizer_instance_group", {}),
        ("intra_dist_opt", "get_intra_distributed_optimizer_instance_group", {}),
        ("dp_cp", "get_data_parallel_group", {"with_context_parallel": True}),
        ("dp", "get_data_parallel_group", {}),
        ("cp", "get_context_parallel_group", {}),
        ("pp", "get_pipeline_model_parallel_group", {}),
        ("tp", "get_tensor_model_parallel_group", {}),
    ]
    for name, function, options in calls:
        call = getattr(mpu, function, None)
        if call is None:
            continue
        try:
            group = call(**known_to(call, check_initialized=False, **options))
        except (AnalyzerError, AssertionError):  # an older release, or this rank is not in the group
            continue
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            yield name, group
    if hasattr(mpu, "get_hierarchical_context_parallel_groups"):  # since 0.10
        hierarchy = mpu.get_hierarchical_context_parallel_groups(check_initialized=False)
        yield from zip(("cp_a2a", "cp_p2p"), hierarchy or (), strict=False)
    yield "world", dist.group.WORLD
