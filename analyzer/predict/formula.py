"""The formula engine: from a training job to its full report."""

from __future__ import annotations

from typing import Final

from analyzer.communication.table import communication_rows, totals
from analyzer.layout.groups import Group, group_count, group_size, groups
from analyzer.layout.stages import mtp_rank
from analyzer.memory.ranks import replayed_classes
from analyzer.memory.stages import analysed_stages
from analyzer.memory.verdict import verdict
from analyzer.modules.kinds import ADAPTER_PROJECTIONS
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.passes.stages import full_model
from analyzer.predict.assumptions import assumptions
from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.specs.rules import check_job

REPORTED_GROUPS: Final = ("tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd")
FULL_LISTS_UP_TO: Final = 4096
"""World size up to which all groups are listed; beyond it each list has about this many ranks."""


def predict(job: TrainingJob, *, note: str = "") -> Report:
    """Trees, memory, groups, communication and verdict; `note` is about the GPU and is part of the verdict.

    Raises InputError for layouts that Megatron refuses.
    """
    check_job(job)
    stages = analysed_stages(job)
    ranks = replayed_classes(job, stages, every_part=True)
    models = [stage.model for stage in stages]
    rows = communication_rows(job, models, [stage.buffers for stage in stages])
    unknown = job.unknown
    if job.assumed_vocabulary is not None:
        from analyzer.predict.vocabulary_range import widen  # imported for such launches only, for a short start-up

        ranks, sentence = widen(job, job.assumed_vocabulary, ranks)
        unknown = (*unknown, sentence)
    outcome = verdict(ranks, job.hardware, note=note, withheld=job.withheld)
    listed, truncated = _groups(job)
    unsharded = full_model(job)
    adapters = _of_adapters(unsharded) if job.model.adapters is not None else ()
    full = sum(parameter.full_numel for parameter in parameters(unsharded)) - sum(each.full_numel for each in adapters)
    routed = sum(parameter.full_numel for parameter in parameters(unsharded) if parameter.sharding == "expert")
    routed -= sum(each.full_numel for each in adapters if each.sharding == "expert")
    model = job.model
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    return Report(
        engine="formula",
        job=job,
        groups=listed,
        groups_truncated=truncated,
        group_counts={kind: group_count(job.parallel, kind) for kind in REPORTED_GROUPS},
        full_model=unsharded,
        parameters=full,
        parameters_unpadded=full - padding,
        parameters_adapters=sum(each.full_numel for each in adapters),
        parameters_active=full - (routed - routed * model.moe.topk // model.moe.num_experts if model.moe else 0),
        parameters_routed_experts=routed,
        ranks=ranks,
        communication=rows,
        communication_totals=totals(job, rows),
        verdict=outcome,
        advice=(),
        assumptions=(*job.assumptions, *assumptions(job, ranks, models)),
        warnings=job.warnings,
        unknown=unknown,
    )


def _of_adapters(tree: Module) -> tuple[Parameter, ...]:
    """The parameters of adapters, which are not those of the model."""
    return tuple(each for _, module in tree.walk() if module.kind in ADAPTER_PROJECTIONS for each in module.parameters)


def _groups(job: TrainingJob) -> tuple[dict[str, tuple[Group, ...]], bool]:
    """Process groups by kind, and whether the lists are shortened."""
    parallel = job.parallel
    tied, mtp = job.model.tied_embeddings, mtp_rank(job.model, parallel)
    truncated = parallel.world_size > FULL_LISTS_UP_TO
    listed = {}
    for kind in REPORTED_GROUPS:
        members = max(1, group_size(parallel, kind, tied=tied, mtp_rank=mtp))
        limit = max(1, FULL_LISTS_UP_TO // 8 // members) if truncated else None
        listed[kind] = tuple(groups(parallel, kind, tied=tied, mtp_rank=mtp, limit=limit))
    return listed, truncated
