"""Heads of models that score or embed samples, in place of the output layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.specs.fine_tuning import FineTuning


def with_head(tuning: FineTuning, job: TrainingJob) -> tuple[TrainingJob, str]:
    """The job with the head of the launch, and why it is counted as that of a language model instead.

    The embedding is then the only module with its weight.
    """
    if tuning.head_outputs is None and not tuning.token_score:
        return job, ""
    reason = next(_not_modelled(tuning, job), "")
    if reason:
        return job, f"the head of {tuning.method} is counted as that of a language model {reason}"
    if tuning.token_score:
        return replace(job, model=replace(job.model, token_score=True)), ""
    return replace(
        job, model=replace(job.model, head_outputs=tuning.head_outputs, value_head=tuning.value_head, tied_embeddings=False)
    ), ""


def _not_modelled(tuning: FineTuning, job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches the head is not modelled."""
    model = job.model
    reasons = {
        f"in a {model.family.upper()} model": model.family != "gpt",
        "in hybrid models": model.hybrid is not None,
        "with MTP layers": model.mtp_num_layers > 0,
        "with tied embeddings and pipeline stages": model.tied_embeddings and job.parallel.pipeline > 1,
        "with context parallelism": tuning.head_outputs == 0 and job.parallel.context > 1,
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs": job.graphs is not None,
        "with overlapped microbatches": job.flags.overlap_moe_expert_parallel_comm,
        "with Muon": job.optimizer.muon is not None,
        "in layers of Megatron itself": model.implementation != "transformer_engine",
    }
    yield from (reason for reason, applies in reasons.items() if applies)
