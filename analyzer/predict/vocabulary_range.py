"""The effect of an unknown vocabulary size on the memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzer.memory.ranks import tensor_classes
from analyzer.memory.stages import analysed_stages
from analyzer.memory.verdict import highest
from analyzer.results import RankClass
from analyzer.specs import AssumedVocabulary, TrainingJob
from analyzer.units import format_bytes


def widen(job: TrainingJob, assumed: AssumedVocabulary, ranks: Sequence[RankClass]) -> tuple[tuple[RankClass, ...], str]:
    """`ranks` with a `device_range_bytes` that covers the other vocabulary sizes, and a sentence for the start of the report."""
    others = [tensor_classes(changed, analysed_stages(changed)) for changed in _with_other_sizes(job, assumed)]
    own = tensor_classes(job, analysed_stages(job))
    widened = tuple(_covering(rank, [rank, *(each for ranks in others for each in ranks)]) for rank in ranks)
    differences = [_device_bytes(each) - _device_bytes(own) for each in others]
    return widened, sentence(assumed, job.model.vocab_size, differences)


def _with_other_sizes(job: TrainingJob, assumed: AssumedVocabulary) -> list[TrainingJob]:
    return [
        replace(job, model=replace(job.model, vocab_size=size, padded_vocab_size=padded), assumed_vocabulary=None)
        for size, padded in assumed.others
    ]


def _device_bytes(ranks: Sequence[RankClass]) -> int:
    """Device memory of the highest-memory rank."""
    return highest(ranks).memory.device_bytes


def _covering(rank: RankClass, others: Sequence[RankClass]) -> RankClass:
    """`rank` with a range that covers the ranges of all rank classes of its pipeline stage."""
    ranges = [each.memory.device_range_bytes for each in others if each.pipeline_rank == rank.pipeline_rank]
    covered = (min(least for least, _ in ranges), max(most for _, most in ranges))
    return replace(rank, memory=replace(rank.memory, device_range_bytes=covered))


def sentence(assumed: AssumedVocabulary, size: int, differences: Sequence[int], *, what: str = "The highest-memory rank") -> str:
    """What is assumed, and the effect of the other sizes. `size`: tokens that are assumed. `differences`: bytes that `what` would
    need in addition with each of the other sizes.
    """
    changes = [
        f"{format_bytes(abs(difference))} {'more' if difference >= 0 else 'less'} with {other:,}"
        for (other, _), difference in zip(assumed.others, differences, strict=True)
    ]
    effect = f"{what} would need {' and '.join(changes)}."
    if not any(differences):
        effect = f"{what} does not depend on it."
    return f"The vocabulary size is not known ({assumed.reason}): {size:,} tokens are assumed. {effect} Give it with --vocab-size."
