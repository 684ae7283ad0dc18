"""The formula engine: from a training job to its full report."""

from __future__ import annotations

from typing import Final

from analyzer.communication.table import communication_rows, totals
from analyzer.layout.groups import Group, group_count, group_size, groups
from analyzer.layout.stages import mtp_rank
from analyzer.memory.ranks import replayed_classes
from analyzer.memory.stages import analysed_stages
from analyzer.memory.verdict import verdict, verdict_with_images
from analyzer.passes.stages import full_model
from analyzer.predict.assumptions import assumptions
from analyzer.predict.parameter_counts import parameter_counts
from analyzer.results import RankClass, Report, Verdict
from analyzer.specs import TrainingJob
from analyzer.specs.rules import check_job
from analyzer.units import format_bytes

REPORTED_GROUPS: Final = ("tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd")
_LONGEST: Final = "each sample is counted with the longest length, with which it would not fit; shorter samples need less"
_ALL_RESPONSES: Final = "all tokens are counted as those of responses, with which it would not fit; fewer tokens need less"
FULL_LISTS_UP_TO: Final = 4096
"""World size up to which all groups are listed; beyond it each list has about this many ranks."""


def predict(job: TrainingJob, *, note: str = "") -> Report:
    """Trees, memory, groups, communication and verdict; `note` is about the GPU and is part of the verdict.

    Raises InputError for layouts that Megatron refuses.
    """
    check_job(job)
    stages = analysed_stages(job)
    ranks = replayed_classes(job, stages, every_part=True, frees=True)
    models = [stage.model for stage in stages]
    rows = communication_rows(job, models, [stage.buffers for stage in stages])
    unknown = job.unknown
    if job.assumed_vocabulary is not None:
        from analyzer.predict.vocabulary_range import widen  # imported for such launches only, for a short start-up

        ranks, sentence = widen(job, job.assumed_vocabulary, ranks)
        unknown = (*unknown, sentence)
    outcome = _verdict(job, ranks, note)
    if outcome.fits is False and job.tuning.longest_counted:
        reason = _LONGEST if job.model.distillation is None else _ALL_RESPONSES
        outcome = verdict(ranks, job.hardware, note=note, withheld=(reason,))
    listed, truncated = _groups(job)
    unsharded = full_model(job)
    counts = parameter_counts(job.model, unsharded)
    return Report(
        engine="formula",
        job=job,
        groups=listed,
        groups_truncated=truncated,
        group_counts={kind: group_count(job.parallel, kind) for kind in REPORTED_GROUPS},
        full_model=unsharded,
        parameters=counts.total,
        parameters_unpadded=counts.unpadded,
        parameters_adapters=counts.adapters,
        parameters_active=counts.active,
        parameters_routed_experts=counts.routed_experts,
        ranks=ranks,
        communication=rows,
        communication_totals=totals(job, rows),
        verdict=outcome,
        advice=(),
        assumptions=(*job.assumptions, *assumptions(job, ranks, models)),
        warnings=job.warnings,
        unknown=unknown,
    )


def _verdict(job: TrainingJob, ranks: tuple[RankClass, ...], note: str) -> Verdict:
    if job.images is None:
        return verdict(ranks, job.hardware, note=note, withheld=job.withheld, not_counted=job.not_counted)
    from analyzer.memory.images import image_bytes  # imported for such launches only, for a short start-up

    bound = image_bytes(job)
    reason = (
        f"the images of {job.images.model} need up to {format_bytes(bound)} more, with which it may not fit; "
        "--info-image-tokens N bounds them to N tokens of a sequence"
    )
    return verdict_with_images(
        ranks,
        job.hardware,
        images_bytes=bound,
        reason=reason,
        note=note,
        withheld=job.withheld,
        not_counted=job.not_counted,
    )


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
