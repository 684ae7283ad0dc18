"""Throughput of hybrid models that public benchmarks measured. No constant is fitted to them.

Nemotron 3 Super on GB200, with two tensor-parallel ranks, is predicted up to 19 % too fast.
"""

from __future__ import annotations

import json
import statistics
from functools import cache
from typing import Any

import pytest

from analyzer.api import analyze
from tests.data_files import data_file

RECORDS: list[dict[str, Any]] = json.loads(data_file("measured_time/hybrids.json").read_text())


@cache
def predicted(place: int) -> tuple[float, tuple[float, float]]:
    """Seconds of an iteration of a record, and their range."""
    record = RECORDS[place]
    nodes = ("--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]))
    time = analyze([*nodes, record["script"], *record["argv"].split()], gpu=record["gpu"]).time
    assert time is not None
    assert time.range_seconds is not None
    return time.iteration_seconds, time.range_seconds


def measured(record: dict[str, Any]) -> float:
    """Seconds of an iteration."""
    return float(record["tokens"] / (record["nodes"] * record["gpus_per_node"]) / record["tokens_per_second_per_gpu"])


@pytest.mark.parametrize("place", range(len(RECORDS)), ids=[record["id"] for record in RECORDS])
def test_time_of_a_measured_hybrid(place: int) -> None:
    seconds, (shortest, longest) = predicted(place)
    assert seconds == pytest.approx(measured(RECORDS[place]), rel=0.2)
    assert shortest < measured(RECORDS[place]) < longest


def test_half_of_the_measured_hybrids_are_predicted_within_a_tenth() -> None:
    errors = [abs(predicted(place)[0] / measured(record) - 1) for place, record in enumerate(RECORDS)]
    assert statistics.median(errors) < 0.1
