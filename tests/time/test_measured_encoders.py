"""Iterations of BERT, T5 and vision-language models that functional tests of Megatron-LM measured. No constant is fitted to them.

The models are small, so that the GPU waits for the host, except the MIMO models with a language model of seven billion parameters.
The code of the runs on A100 GPUs is older, and they are slower: only those on H100 GPUs are compared.
"""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

import pytest

from analyzer.api import analyze
from analyzer.results import TimeEstimate
from tests.data_files import data_file

RUNS = [
    (launch, run)
    for name in ("measured_encoders.json", "measured_vision.json")
    for launch in json.loads(data_file(name).read_text())["launches"]
    for run in launch["runs"]
    if run["gpu"].startswith("H100")
]


@cache
def _time(launch: str, environ: tuple[tuple[str, str], ...]) -> TimeEstimate:
    time = analyze(launch.split(), environ=dict(environ), gpu="H100-80GB").time
    assert time is not None
    return time


def _ratio(launch: dict[str, Any], run: dict[str, Any]) -> tuple[float, bool]:
    """Measured over predicted time, and whether the measured time is in the range."""
    time = _time(launch["launch"], tuple(launch["env"].items()))
    assert time.range_seconds is not None
    measured = run["iteration_seconds"]
    return measured / time.iteration_seconds, time.range_seconds[0] < measured < time.range_seconds[1]


@pytest.mark.parametrize(("launch", "run"), [each for each in RUNS if each[0]["model"] == "mimo"])
def test_the_time_of_a_model_that_fills_a_gpu(launch: dict[str, Any], run: dict[str, Any]) -> None:
    ratio, inside = _ratio(launch, run)
    assert inside
    assert 1 < ratio < 1.1


def test_times_of_small_models_are_in_their_range() -> None:
    """Of 16 runs 13: not those of the T5 with 11 billion parameters and of LLaVA (docs/time.md)."""
    found = [_ratio(*each) for each in RUNS if each[0]["model"] != "mimo"]
    assert len(found) == 16
    assert sum(inside for _, inside in found) >= 13
    assert 1.4 < median(ratio for ratio, _ in found) < 1.7  # the time of the host is predicted too short
