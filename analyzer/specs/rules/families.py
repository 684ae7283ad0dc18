"""Rules of models other than GPT. Sources: pretrain_bert.py and pretrain_t5.py, megatron-core 0.16.1."""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.job import TrainingJob
from analyzer.specs.model import FAMILY_NAMES
from analyzer.specs.rules.violation import Violation


def family_violations(job: TrainingJob) -> Iterator[Violation]:
    """Layouts and options that Megatron refuses for BERT or T5, or that their scripts do not support."""
    model, parallel = job.model, job.parallel
    if model.family == "gpt":
        return
    name = FAMILY_NAMES[model.family]
    if model.vision is not None:
        yield from _vision_violations(job)
    elif parallel.context > 1:
        yield Violation(("context_parallel_size",), f"the script of {name} does not split its batch over ranks", "use 1")
    if model.family == "t5":
        yield from _t5_violations(job)


def _t5_violations(job: TrainingJob) -> Iterator[Violation]:
    model, recompute = job.model, job.recompute
    if job.parallel.pipeline > 1:
        fault = "T5 has no pipeline parallelism since core 0.14, and none is modelled"
        yield Violation(("pipeline_model_parallel_size",), fault, "use 1, and a larger --tensor-model-parallel-size instead")
    short, tensor = model.decoder_seq_length, job.parallel.tensor
    if job.parallel.sequence_parallel and short is not None and short % tensor:
        fault = f"{short} tokens cannot be split over {tensor} tensor-parallel ranks"
        yield Violation(("decoder_seq_length", "tensor_model_parallel_size"), fault, f"use a multiple of {tensor}")
    selective = recompute.granularity == "selective"
    around_attention = recompute.granularity == "full" or (selective and "core_attn" in recompute.modules)
    if around_attention and model.implementation == "transformer_engine":
        # `CheckpointFunction.forward` saves its arguments, and the mask of cross-attention is a tuple
        fault = "cannot checkpoint the attention of Transformer Engine in T5, whose mask is a pair of tensors"
        yield Violation(("recompute_granularity",), fault, "use --transformer-impl local, or leave it out")


def _vision_violations(job: TrainingJob) -> Iterator[Violation]:
    parallel = job.parallel
    if parallel.context > 1 and parallel.pipeline > 1:
        fault = "pretrain_vlm.py cannot split sequences over ranks and have pipeline stages at the same time"
        yield Violation(("context_parallel_size", "pipeline_model_parallel_size"), fault, "use 1 for one of them")
