"""Rules of models other than GPT. Sources: pretrain_bert.py, pretrain_t5.py and pretrain_vlm.py, megatron-core 0.16.1."""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.job import TrainingJob
from analyzer.specs.model import FAMILY_NAMES, FROZEN_PARTS
from analyzer.specs.rules.violation import Violation


def family_violations(job: TrainingJob) -> Iterator[Violation]:
    """Layouts and options that Megatron refuses for these models, or that their scripts do not support."""
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
    """`model_provider` of pretrain_vlm.py, `LLaVAModel.__init__`, and `get_batch` of examples/mimo/train.py."""
    model, parallel = job.model, job.parallel
    if model.family == "mimo" and parallel.pipeline > 1:
        yield Violation(("pipeline_model_parallel_size",), "MIMO models have no pipeline stages", "use 1")
    if parallel.context > 1 and parallel.pipeline > 1:
        fault = "pretrain_vlm.py cannot split sequences over ranks and have pipeline stages at the same time"
        yield Violation(("context_parallel_size", "pipeline_model_parallel_size"), fault, "use 1 for one of them")
    vision = model.vision
    several = vision is not None and vision.class_tokens > 1 and not vision.drops_class_tokens
    if several and parallel.pipeline > 1:  # there `class_token_len` is 1
        fault = "the last stage counts one class token of the encoder, which has more"
        yield Violation(("pipeline_model_parallel_size",), fault, "use 1, or --disable-vision-class-token")
    split = parallel.context > 1 or (parallel.sequence_parallel and parallel.tensor > 1)
    if split and model.implementation == "local":
        fault = "splitting a sequence of text and images needs the attention of Transformer Engine"
        yield Violation(
            ("context_parallel_size", "sequence_parallel"), fault, "use layers of Transformer Engine, or leave both out"
        )
    if {*model.frozen} == {*FROZEN_PARTS}:
        yield Violation(("freeze_LM", "freeze_ViT"), "nothing is trained", "leave one of them out")
