"""Which losses of students are modelled, and the models of teachers and of other phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.specs.distillation import DistillationSpec
    from analyzer.specs.fine_tuning import FineTuning, Phase


def with_distillation(tuning: FineTuning, job: TrainingJob) -> tuple[TrainingJob, str]:
    """The job with the loss of a student, and why it is counted as that of a language model instead.

    Raises InputError for a teacher that ms-swift refuses.
    """
    spec = tuning.distillation
    if spec is None:
        return job, ""
    _refuse(tuning, spec, job)
    reason = next(_not_modelled(tuning, job), "")
    if reason:
        return job, f"the loss of {tuning.method} is counted as that of a language model {reason}"
    return replace(job, model=replace(job.model, distillation=spec)), ""


def with_log_probabilities(tuning: FineTuning, job: TrainingJob) -> tuple[TrainingJob, str]:
    """The job with a loss of NeMo-RL, and why it is counted as a cross entropy instead."""
    if not tuning.log_probability_loss:
        return job, ""
    reason = next(_not_modelled(tuning, job), "")
    if reason:
        return job, f"the log-probabilities of NeMo-RL's loss are counted as a cross entropy of Megatron-LM {reason}"
    return replace(job, model=replace(job.model, log_probability_loss=True, loss_sequences=tuning.loss_sequences)), ""


def note_on(spec: DistillationSpec) -> str:
    """The assumption about the loss of a student."""
    if spec.framework == "ms-swift":
        return (
            "The loss compares the logits of all tokens with those of the teacher: tokens of a prompt, which it leaves out, "
            "need less memory. The teacher has computed the logits of all microbatches before the first forward."
        )
    note = f"The loss compares logits with the {spec.topk} largest of the teacher, which come from the host with each microbatch."
    if spec.sequences:
        note += (
            f" A packed microbatch is counted with {spec.sequences} sequences of equal length in the loss, where the gradient "
            "of each has the size of all logits: with one or two sequences it needs less."
        )
    return note


def _refuse(tuning: FineTuning, spec: DistillationSpec, job: TrainingJob) -> None:
    """Raises InputError for what ms-swift, or `torch.topk`, refuses."""
    if spec.framework != "ms-swift":
        return
    own = next((each for each in tuning.phases if each.name == "teacher" and each.model_name), None)
    if own is not None and job.parallel.virtual_pipeline is not None:
        fault = "ms-swift refuses a local teacher with interleaved stages"
        raise InputError("--teacher_model", fault, "leave out the virtual pipeline size, or use --teacher_model_server")
    if spec.from_server and spec.topk is None:
        fault = "ms-swift refuses it without --gkd_logits_topk, because a server sends the largest logits only"
        raise InputError("--teacher_model_server", fault, "add --gkd_logits_topk 64, for example")
    most = job.model.padded_vocab_size // job.parallel.tensor
    if spec.topk is not None and not 1 <= spec.topk <= most:
        raise InputError(
            "--gkd_logits_topk", f"{spec.topk} is not a number from 1 to {most:,}, the logits of a rank", "use 64, for example"
        )


def _not_modelled(tuning: FineTuning, job: TrainingJob) -> Iterator[str]:
    """Fragments of a sentence: in which launches the loss of a student is not modelled."""
    model, spec = job.model, tuning.distillation
    teacher = next((each.model for each in tuning.phases if each.name == "teacher" and each.model is not None), model)
    reasons = {
        "with a term of the labels": spec is not None and spec.reads_labels,
        f"in a {model.family.upper()} model": model.family != "gpt",
        "in hybrid models": model.hybrid is not None and spec is not None,
        "with MTP layers": model.mtp_num_layers > 0,
        "with frozen parameters": tuning.freezing is not None,
        "in fp32": job.precision.parameters == "fp32",
        "with another vocabulary of the teacher": teacher.padded_vocab_size != model.padded_vocab_size
        and (spec is None or spec.topk is None),
        "with FSDP": job.fsdp is not None,
        "with CUDA graphs": job.graphs is not None,
        "with overlapped microbatches": job.flags.overlap_moe_expert_parallel_comm,
        "with a deferred gradient of the output layer": job.flags.defer_embedding_wgrad,
        "in layers of Megatron itself": model.implementation != "transformer_engine",
    }
    yield from (reason for reason, applies in reasons.items() if applies)


def with_phase_models(tuning: FineTuning, with_model: Callable[[Phase], Phase | None]) -> tuple[FineTuning, str]:
    """The phases with the sizes of the models that they name, and which are not known. `with_model`: None for one of these."""
    found: list[Phase] = []
    unknown = ""
    for phase in tuning.phases:
        made = with_model(phase) if phase.model_name and phase.on_same_gpus else phase
        if made is None:
            unknown = f"the sizes of {phase.model_name} are not known, and its memory is not counted"
            made = replace(phase, weights=None, work=None, training=None)
        if made.training is not None and made.training.job is not None and made.training.job.withheld:
            unknown = f"of the {made.name}: {made.training.job.withheld[0]}"
        found.append(made)
    return replace(tuning, phases=tuple(found)), unknown
