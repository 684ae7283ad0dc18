"""The effect of an unknown vocabulary size on the memory of inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzer.inference.memory import stage_memories
from analyzer.inference.results import StageMemory
from analyzer.predict.vocabulary_range import sentence
from analyzer.specs import AssumedVocabulary, InferenceJob


def widen(job: InferenceJob, assumed: AssumedVocabulary, stages: Sequence[StageMemory]) -> tuple[tuple[StageMemory, ...], str]:
    """`stages` with a `device_range_bytes` that covers the other vocabulary sizes, and a sentence for the start of the report."""
    others = [stage_memories(changed) for changed in with_other_sizes(job, assumed)]
    widened = tuple(_covering(each, same) for each, *same in zip(stages, *others, strict=True))
    differences = [_highest(each) - _highest(stages) for each in others]
    return widened, sentence(assumed, job.model.vocab_size, differences)


def with_other_sizes(job: InferenceJob, assumed: AssumedVocabulary) -> list[InferenceJob]:
    """The job with each of the other vocabulary sizes."""
    return [
        replace(job, model=replace(job.model, vocab_size=size, padded_vocab_size=padded), assumed_vocabulary=None)
        for size, padded in assumed.others
    ]


def _covering(stage: StageMemory, others: Sequence[StageMemory]) -> StageMemory:
    sizes = [each.device_bytes for each in (stage, *others)]
    return replace(stage, device_range_bytes=(min(sizes), max(sizes)))


def _highest(stages: Sequence[StageMemory]) -> int:
    return max(stage.device_bytes for stage in stages)
