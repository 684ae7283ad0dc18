"""Model FLOPs are those that Megatron's `num_floating_point_operations` returns for the same launch and release."""

from __future__ import annotations

from typing import Any

import pytest

from analyzer.specs import TrainingJob
from analyzer.time.work.model_flops import model_flops
from tests.data_files import truth
from tests.job_of import job_of

CONTENT = truth("flops.json")
RECORDS: list[dict[str, Any]] = CONTENT["records"]


def job(launch: str, release: str) -> TrainingJob:
    return job_of(CONTENT["launches"][launch], base="", release=release)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['launch']}-{record['release']}")
def test_the_result_is_that_of_megatron(record: dict[str, Any]) -> None:
    """Floats of Megatron are compared as the nearest integer: above 2**53 that is the float itself."""
    flops = model_flops(job(record["launch"], record["release"]))
    assert flops == round(record["flops"])


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.4.0", "0.6.0"),
        ("0.6.0", "0.9.0"),
        ("0.10.0", "0.11.0"),
        ("0.11.0", "0.15.3"),
        ("0.15.3", "0.16.1"),
        ("0.16.1", "0.17.1"),
        ("0.17.1", "0.18.2"),
    ],
)
def test_the_records_tell_the_formulas_apart(older: str, newer: str) -> None:
    """A launch exists for which Megatron returns another number, so that the wrong formula fails a test."""
    flops = {(record["release"], record["launch"]): record["flops"] for record in RECORDS}
    assert any(flops.get((newer, launch), value) != value for (release, launch), value in flops.items() if release == older)


@pytest.mark.parametrize(
    ("release", "like"),
    [
        ("2023", "0.4.0"),
        ("0.3.0", "0.4.0"),
        ("0.5.0", "0.6.0"),
        ("0.7.0", "0.9.0"),
        ("0.12.3", "0.15.3"),
        ("0.13.0", "0.15.3"),
        ("0.14.0", "0.15.3"),
    ],
)
def test_a_release_without_record_has_the_formula_of_another(release: str, like: str) -> None:
    assert model_flops(job("gpt_one_sequence", release)) == model_flops(job("gpt_one_sequence", like))


def test_llama_3_8b_has_6_flops_per_weight_and_token_plus_attention() -> None:
    """6 FLOPs per weight of a GEMM (Kaplan et al., 2020), and 12·h·s per layer for attention, half of it with a causal mask.

    Llama-3-8B has 8,030,261,248 parameters. The embedding (128,256 rows of 4,096) and 65 norms of 4,096 are no weights of GEMMs.
    """
    gemms = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    token = 6 * gemms + 32 * 12 * 4096 * 8192 // 2
    assert token == 51_470_401_536  # 45.03 billion for the weights and 6.44 billion for attention
    assert model_flops(job("gqa", "0.19.0")) == 128 * 8192 * token
