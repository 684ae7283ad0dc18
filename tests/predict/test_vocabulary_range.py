"""What a report says if the vocabulary size is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.predict import predict
from analyzer.specs import TrainingJob
from tests.job_of import BASE, HOPPER, job_of

UNKNOWN = BASE.replace("--tokenizer-type NullTokenizer --vocab-size 32000", "--tokenizer-type HuggingFaceTokenizer")


def with_size(size: int) -> TrainingJob:
    base = UNKNOWN + f" --tokenizer-model nobody/nothing --vocab-size {size}"
    return job_of("--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2", base=base)


def unknown(capacity: int | None = None) -> TrainingJob:
    gpu = replace(HOPPER, capacity_bytes=capacity)
    line = "--tokenizer-model nobody/nothing --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
    return job_of(line, base=UNKNOWN, gpu=gpu)


def test_the_range_covers_small_and_large_vocabularies() -> None:
    report = predict(unknown())
    assert report.job.model.vocab_size == 128_000
    small, large = predict(with_size(32_000)), predict(with_size(256_000))
    assert len(report.ranks) == len(small.ranks) == len(large.ranks) == 2
    for rank, least, most in zip(report.ranks, small.ranks, large.ranks, strict=True):
        assert rank.memory.device_range_bytes[0] <= least.memory.device_range_bytes[0]
        assert rank.memory.device_range_bytes[1] >= most.memory.device_range_bytes[1] * 0.99
    assert report.ranks[0].memory.peak_allocated_bytes == predict(with_size(128_000)).ranks[0].memory.peak_allocated_bytes


def test_the_report_begins_with_the_assumption_and_its_effect() -> None:
    report = predict(unknown())
    [sentence] = report.unknown
    assert sentence.startswith("The vocabulary size is not known (nobody/nothing is neither")
    for part in ("128,000 tokens are assumed", "less with 32,000", "more with 256,000", "--vocab-size"):
        assert part in sentence
    assert predict(with_size(128_000)).unknown == ()


@pytest.mark.parametrize(("size", "state"), [(32_000, "tight"), (256_000, "tight")])
def test_a_capacity_between_the_sizes_is_tight(size: int, state: str) -> None:
    needed = max(rank.memory.device_bytes for rank in predict(with_size(size)).ranks)
    assert predict(unknown(needed)).verdict.state == state
