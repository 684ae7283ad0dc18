"""Predictions for measured iterations, through the same function as the Python API, and the order of measured layouts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import analyzer
from tests.data_files import data_file

Records = list[dict[str, Any]]


def predicted(record: dict[str, Any]) -> float:
    """Seconds of an iteration."""
    words = ("--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), "pretrain_gpt.py", *record["argv"])
    return seconds_of(words, record["gpu"], tuple(record.get("env", {}).items()))


@cache
def seconds_of(words: tuple[str, ...], gpu: str, environ: tuple[tuple[str, str], ...]) -> float:
    """Seconds of an iteration of a launch, of which there can be several records."""
    found = analyzer.analyze(words, gpu=gpu, environ=dict(environ), folder="/nowhere").time
    assert found is not None, words
    return found.iteration_seconds


@cache
def pairs(name: str) -> tuple[tuple[dict[str, Any], float, float], ...]:
    """Each record of a file with its predicted and its measured seconds."""
    records: Records = json.loads(data_file(f"measured_time/{name}.json").read_text())
    return tuple((record, predicted(record), record["measured"]["iteration_seconds"]) for record in records)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number", "median", "ninth_decile"), [("dense", 249, 0.035, 0.10), ("moe", 99, 0.04, 0.165)])
def test_errors_of_the_predictions(kind: str, number: int, median: float, ninth_decile: float) -> None:
    """Those of the records that the constants are fitted to."""
    found = [each for each in pairs("iterations") if each[0]["kind"] == kind and each[0].get("fit", True)]
    errors = [abs(guess / real - 1) for _, guess, real in found]
    assert len(errors) == number
    assert quantile(errors, 0.5) <= median
    assert quantile(errors, 0.9) <= ninth_decile


@pytest.mark.slow
def test_errors_for_b200_nodes_without_overlap() -> None:
    """SimuMax publishes these iterations, with a mean error of 5.6 % of its own predictions."""
    errors = [abs(guess / real - 1) for record, guess, real in pairs("iterations") if record["id"].startswith("simumax")]
    assert len(errors) == 43
    assert statistics.mean(errors) <= 0.05


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(each)) for each in range(len(values))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "correlation"),
    [
        ("llama-13b on 64 GPUs, sequence 8192", 0.95),
        ("llama-13b on 64 GPUs, sequence 2048", 0.88),
        ("llama-13b on 128 GPUs, sequence 8192", 0.75),
        ("llama-13b on 32 GPUs, sequence 2048", 0.7),
    ],
)
def test_the_order_of_layouts(group: str, correlation: float) -> None:
    """Spearman's rank correlation, and that the fastest layout is predicted within 1 % of the first one, which is a tie."""
    found = [(guess, real) for record, guess, real in pairs("layouts") if record["group"] == group]
    guesses, reals = zip(*found, strict=True)
    assert statistics.correlation(ranks(guesses), ranks(reals)) >= correlation
    assert min(reals) in [real for guess, real in found if guess <= 1.01 * min(guesses)]
