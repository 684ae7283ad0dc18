"""Predictions for the runs that FlexLLMGen's authors measured on a T4, and the order of their policies."""

from __future__ import annotations

from functools import cache

import pytest

from analyzer.inference.offload.machine import machine_of
from analyzer.inference.offload.memory import actual
from analyzer.inference.offload.steps import block
from tests.inference.offload.small_case import fits
from tools.score_offload import Score, case, loss_of_first, of_group, placement, quantile, records, score, score_of_best

T4 = machine_of("T4")


@cache
def known() -> tuple[Score, ...]:
    return tuple(score(record, T4) for record in records(published=True))


@cache
def searched() -> tuple[Score, ...]:
    return tuple(score_of_best(record, T4) for record in records(published=False))


def errors(scores: list[Score]) -> list[float]:
    return [each.error for each in scores]


@pytest.mark.parametrize(
    ("model", "tested", "number", "median", "ninth_decile"),
    [("opt-6.7b", None, 16, 0.06, 0.15), ("opt-30b", False, 14, 0.06, 0.18), ("opt-30b", True, 8, 0.09, 0.42)],
)
def test_errors_of_the_predictions(model: str, tested: bool | None, number: int, median: float, ninth_decile: float) -> None:
    found = errors(of_group(known(), model, tested=tested))
    assert len(found) == number
    assert quantile(found, 0.5) <= median
    assert quantile(found, 0.9) <= ninth_decile


@pytest.mark.slow
def test_errors_of_all_runs() -> None:
    found = errors([*known(), *searched()])
    assert len(found) == 56
    assert quantile(found, 0.5) <= 0.15
    assert quantile(found, 0.9) <= 0.35


@pytest.mark.slow
def test_the_policy_ranked_first_is_near_the_fastest() -> None:
    published = of_group(known(), "opt-30b", tested=True)
    assert loss_of_first(published) <= 0.1
    assert loss_of_first([*published, *searched()]) <= 0.1


def test_decode_speed_is_predicted_apart() -> None:
    """FlexLLMGen's README has it for two runs. One is predicted 7 % too slow, one 24 % too fast, at the expense of its prefill."""
    for record in records(published=True):
        if "measured_decode_tok_s" in record:
            inputs = case(record, T4)
            seconds = block(inputs).actual_seconds(placement(record)).decode
            speed = (record["gen_len"] - 1) * inputs.schedule.block_size / seconds
            assert speed == pytest.approx(record["measured_decode_tok_s"], rel=0.25)


@pytest.mark.parametrize("record", records(published=True), ids=lambda record: str(record["id"]))
def test_every_run_fits(record: dict[str, object]) -> None:
    """They ran on a T4 with 208 GB of host memory."""
    inputs = case(record, T4)
    assert fits(inputs, actual(inputs, placement(record)))
