"""Assumptions behind the formulas, for the report."""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.modules.stage import StageModel
from analyzer.results import RankClass
from analyzer.specs import FlexSpec, TrainingJob
from analyzer.units import GIB


def assumptions(job: TrainingJob, ranks: Sequence[RankClass], stages: Sequence[StageModel]) -> tuple[str, ...]:
    """Assumptions behind the formulas for a job, one sentence each."""
    stated = [
        _reserved(ranks),
        "the CUDA context (0.5 GiB) and NCCL buffers (16 channels for each communicator) are estimates",
    ]
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
    if job.optimizer.offload is not None or job.optimizer.muon is not None:
        from analyzer.states.notes import optimizer_notes

        stated.extend(optimizer_notes(job, stages))
    return tuple(stated)


def _reserved(ranks: Sequence[RankClass]) -> str:
    """How reserved memory is estimated."""
    replayed = sum(rank.memory.replayed for rank in ranks)
    estimate = "the peak plus the largest temporary tensor"
    if not replayed:
        return f"reserved memory is estimated as {estimate}"
    replay = "estimated by replaying the large allocations through a simulation of PyTorch's caching allocator"
    if replayed == len(ranks):
        return f"reserved memory is {replay}"
    which = "highest-memory stage" if replayed == 1 else f"{replayed} highest-memory stages"
    return f"reserved memory of the {which} of {len(ranks)} is {replay}; of the others it is {estimate}"


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
