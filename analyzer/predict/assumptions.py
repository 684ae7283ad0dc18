"""Assumptions behind the formulas, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.memory.device_overhead import outside_allocator_note
from analyzer.modules.stage import StageModel
from analyzer.results import RankClass
from analyzer.specs import FlexSpec, TrainingJob
from analyzer.units import GIB


def assumptions(job: TrainingJob, ranks: Sequence[RankClass], stages: Sequence[StageModel]) -> tuple[str, ...]:
    """Assumptions behind the formulas for a job, one sentence each."""
    stated = [
        _reserved(ranks),
        outside_allocator_note(job),
    ]
    stated += _of_allocator(job.flags.allocator_config or "")
    released = max(rank.memory.released_bytes for rank in ranks)
    if released:
        stated.append(
            f"PyTorch frees up to {released / GIB:.2f} GiB of unused segments that would exceed the memory of the GPU: the launch "
            "runs without them, but waits for the GPU each time"
        )
    if job.hardware.compute_capability is None and job.model.implementation == "transformer_engine":
        stated.append("no GPU is given: workspaces of a Hopper GPU are assumed")
    if job.activation_offload is not None:
        stated.append(
            "offloaded activations are assumed to leave the GPU when their part of the layer ends, and to return when their "
            "backward starts: too low if copies to the host are slower than the layers"
        )
    if job.model.moe is not None and job.model.moe.flex is not None:
        stated += _of_flex(job.model.moe.flex)
    pool = max(rank.memory.graph_pool_bytes for rank in ranks)
    if pool:
        stated.append(
            f"CUDA graphs use up to {pool / GIB:.2f} GiB in a separate memory pool: it is part of reserved and device "
            "memory, and of allocated memory only during the capture"
        )
    if job.optimizer.offload is not None or job.optimizer.facts.assumptions:
        from analyzer.states.notes import optimizer_notes

        stated.extend(optimizer_notes(job, stages))
    return tuple(stated)


def _of_allocator(config: str) -> Iterator[str]:
    """Assumptions about settings of PyTorch's allocator that are not simulated."""
    if "cudaMallocAsync" in config:
        yield "backend:cudaMallocAsync: the memory pool of CUDA is not simulated"
    if "garbage_collection_threshold" in config:
        effect = "is not simulated" if "per_process_memory_fraction" in config else "has no effect"
        yield (
            f"garbage_collection_threshold {effect}: PyTorch applies it only with a limit for the process "
            "(torch.cuda.set_per_process_memory_fraction), which Megatron-LM does not set"
        )
    elif "per_process_memory_fraction" in config:
        yield "per_process_memory_fraction is not simulated: the launch may fail at that part of the capacity"


def _reserved(ranks: Sequence[RankClass]) -> str:
    """How reserved memory is estimated."""
    replayed = len({rank.pipeline_rank for rank in ranks if rank.memory.replayed})
    stages = len({rank.pipeline_rank for rank in ranks})
    estimate = "the peak plus the largest temporary tensor"
    if not replayed:
        return f"reserved memory is estimated as {estimate}"
    replay = "estimated by replaying the large allocations through a simulation of PyTorch's caching allocator"
    if replayed == stages:
        return f"reserved memory is {replay}"
    which = "highest-memory stage" if replayed == 1 else f"{replayed} highest-memory stages"
    return f"reserved memory of the {which} of {stages} is {replay}; of the others it is {estimate}"


def _of_flex(flex: FlexSpec) -> tuple[str, ...]:
    """Assumptions about the flex dispatcher."""
    if flex.backend == "hybridep":
        return (
            f"HybridEP is assumed to have NVLink domains of {flex.nvlink_ranks} ranks, and buffers for the tokens of its "
            "full group outside PyTorch: too low if domains are smaller",
        )
    return (
        "DeepEP sends a token once to a rank with several of its experts: expert choices are assumed to be independent, so with "
        "group-limited routing activations are slightly overestimated",
    )
