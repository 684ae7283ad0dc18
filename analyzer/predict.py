"""The formula engine: from a launch to everything there is to say about it."""

from __future__ import annotations

from typing import Final

from analyzer.communication.table import messages, totals
from analyzer.layout.groups import group_count, group_size, groups
from analyzer.layout.stages import mtp_rank
from analyzer.memory.ranks import rank_classes, rank_classes_of_tensors
from analyzer.memory.verdict import verdict
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import parameters
from analyzer.passes.stages import full_model
from analyzer.results import Advice, Message, RankClass, Report
from analyzer.specs import FlexSpec, TrainingJob
from analyzer.specs.rules import check_job
from analyzer.units import GIB

REPORTED_GROUPS: Final = ("tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd")
WHOLE_LISTS_UP_TO: Final = 4096
"""Ranks of a world whose groups are all listed; beyond it each list is cut to about this many ranks."""


def predict(job: TrainingJob, *, note: str = "") -> Report:
    """Trees, memory, groups, communication and verdict; `note` is about the GPU and goes with the verdict.

    Raises InputError for layouts that Megatron refuses.
    """
    check_job(job)
    ranks = rank_classes(job)
    whole = full_model(job)
    full = sum(parameter.full_numel for parameter in parameters(whole))
    routed = sum(parameter.full_numel for parameter in parameters(whole) if parameter.sharding == "expert")
    model = job.model
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    rows = _messages(job, ranks)
    outcome = verdict(ranks, job.hardware, note=note)
    listed, truncated = _groups(job)
    return Report(
        engine="formula",
        job=job,
        groups=listed,
        groups_truncated=truncated,
        group_counts={kind: group_count(job.parallel, kind) for kind in REPORTED_GROUPS},
        full_model=whole,
        parameters=full,
        parameters_unpadded=full - padding,
        parameters_active=full - (routed - routed * model.moe.topk // model.moe.num_experts if model.moe else 0),
        parameters_routed_experts=routed,
        ranks=ranks,
        communication=rows,
        communication_totals=totals(job, rows),
        verdict=outcome,
        advice=_advice(job) if outcome.fits is False else (),
        assumptions=(*job.assumptions, *_assumptions(job, ranks)),
    )


def _advice(job: TrainingJob) -> tuple[Advice, ...]:
    from analyzer.search.advice import advise  # only where a launch does not fit

    return advise(job, predict=rank_classes, screen=rank_classes_of_tensors)


def _messages(job: TrainingJob, ranks: tuple[RankClass, ...]) -> tuple[Message, ...]:
    return messages(job, _stages(ranks))


def _stages(ranks: tuple[RankClass, ...]) -> tuple[StageModel, ...]:
    """Each stage once, also where its ranks differ in memory."""
    stages = {each.pipeline_rank: each for each in ranks}
    return tuple(StageModel(pipeline_rank=rank, chunks=each.chunks, trees=each.trees) for rank, each in stages.items())


def _groups(job: TrainingJob) -> tuple[dict[str, tuple[tuple[int, ...], ...]], bool]:
    """Process groups by kind, and whether the lists are cut."""
    parallel = job.parallel
    tied, mtp = job.model.tied_embeddings, mtp_rank(job.model, parallel)
    truncated = parallel.world_size > WHOLE_LISTS_UP_TO
    listed = {}
    for kind in REPORTED_GROUPS:
        members = max(1, group_size(parallel, kind, tied=tied, mtp_rank=mtp))
        limit = max(1, WHOLE_LISTS_UP_TO // 8 // members) if truncated else None
        listed[kind] = tuple(groups(parallel, kind, tied=tied, mtp_rank=mtp, limit=limit))
    return listed, truncated


def _assumptions(job: TrainingJob, ranks: tuple[RankClass, ...]) -> tuple[str, ...]:
    """What the formulas themselves take for granted."""
    stated = [
        _reserved(ranks),
        "the CUDA context (0.5 GiB) and NCCL buffers (16 channels for each communicator) are estimates",
    ]
    if job.hardware.compute_capability is None and job.model.implementation == "transformer_engine":
        stated.append("no GPU is named: workspaces are those of a Hopper GPU")
    if job.activation_offload is not None:
        stated.append(
            "offloaded activations are taken to leave the GPU as soon as their part of the layer is done, and to come back when "
            "their backward starts: too low where copies to the host are slower than the layers"
        )
    if job.model.moe is not None and job.model.moe.flex is not None:
        stated += _of_flex(job.model.moe.flex)
    pool = max(rank.memory.graph_pool_bytes for rank in ranks)
    if pool:
        stated.append(
            f"kernels in CUDA graphs keep up to {pool / GIB:.2f} GiB in a memory pool of their own: reserved and device memory "
            "have it, allocated memory during the capture only"
        )
    if job.optimizer.offload is not None or job.optimizer.muon is not None:
        from analyzer.states.notes import optimizer_notes  # a millisecond that most launches need not spend

        stated.extend(optimizer_notes(job, _stages(ranks)))
    return tuple(stated)


def _reserved(ranks: tuple[RankClass, ...]) -> str:
    """How reserved memory came about."""
    replayed = sum(rank.memory.replayed for rank in ranks)
    estimate = "the peak and room for the largest temporary tensor"
    if not replayed:
        return f"reserved memory is an estimate: {estimate}"
    replay = "large tensors in the order of the modules, put through a model of PyTorch's caching allocator"
    if replayed == len(ranks):
        return f"reserved memory: {replay}"
    which = "fullest stage" if replayed == 1 else f"{replayed} fullest stages"
    return f"reserved memory of the {which} of {len(ranks)}: {replay}; of the others: {estimate}"


def _of_flex(flex: FlexSpec) -> tuple[str, ...]:
    """What is taken for granted of the flex dispatcher."""
    if flex.backend == "hybridep":
        return (
            f"HybridEP is taken to find NVLink domains of {flex.nvlink_ranks} ranks, and to hold buffers for the tokens of its "
            "whole group outside PyTorch: too low where domains are smaller",
        )
    return (
        "DeepEP sends a token once to a rank with several of its experts: choices are taken to be independent of each other, "
        "so that activations are slightly too high where routing is limited to groups of experts",
    )
