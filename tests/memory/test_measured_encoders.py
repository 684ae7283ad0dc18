"""The formulas compared with measured trainings of BERT and T5.

The releases that ran are between core 0.10 and 0.19, and the formulas are those of 0.16.1.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.predict import predict
from analyzer.results import RankClass
from tests.data_files import data_file

MEDIANS = {"bert": 0.0045, "t5": 0.003}
"""Largest median of the absolute errors of the peak."""
LARGEST = {"bert": 0.011, "t5": 0.015}
"""Largest error of the peak (docs/accuracy.md)."""


@cache
def errors() -> dict[str, dict[str, dict[str, float]]]:
    """By model and run: relative errors of the figures."""
    found: dict[str, dict[str, dict[str, float]]] = {"bert": {}, "t5": {}}
    for launch in json.loads(data_file("measured_encoders.json").read_text())["launches"]:
        for run in launch["runs"]:
            found[launch["model"]][run["id"]] = _errors_of(launch, run)
    return found


def _errors_of(launch: dict[str, Any], run: dict[str, Any]) -> dict[str, float]:
    ranks = _ranks(launch["launch"], tuple(launch["env"].items()), run["gpu"])
    memory = next(each.memory for each in ranks if any(first <= launch["rank"] <= last for first, last in each.ranks))
    names = ["allocated_bytes", "peak_allocated_bytes", *([] if run["resumed"] else ["peak_allocated_first_iteration_bytes"])]
    return {name: getattr(memory, name) / run[name] - 1 for name in names}


@cache
def _ranks(launch: str, environ: tuple[tuple[str, str], ...], gpu_name: str) -> tuple[RankClass, ...]:
    folder = Path("/nowhere")
    arguments, world, options = parse(f"{launch} --info-gpu {gpu_name}".split(), environ=dict(environ), folder=folder)
    gpu, _ = hardware(options.gpu, None)
    return predict(build(arguments, world, environ=dict(environ), gpu=gpu, folder=folder)).ranks


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_peaks_agree_with_measured_runs(model: str) -> None:
    peaks = {name: abs(each["peak_allocated_bytes"]) for name, each in errors()[model].items()}
    assert len(peaks) == {"bert": 13, "t5": 31}[model]
    assert median(peaks.values()) <= MEDIANS[model]
    assert max(peaks.values()) <= LARGEST[model], max(peaks, key=lambda name: peaks[name])


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_states_and_workspaces_agree_with_measured_runs(model: str) -> None:
    """Runs of 2026 have the workspaces and kept tensors of the release that is modelled; older ones keep fewer."""
    allocated = {name: abs(each["allocated_bytes"]) for name, each in errors()[model].items()}
    assert median(allocated.values()) <= 0.007
    assert max(allocated.values()) <= 0.02
    assert allocated.get("bert/bert_mcore_tp2_pp2/dev_dgx_h100", 0) < 0.0001
    assert allocated.get("t5/t5_11b_mcore_tp4_pp1/dev_dgx_h100", 0) < 0.0001


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_first_iterations_agree_with_measured_runs(model: str) -> None:
    first = [abs(each[name]) for each in errors()[model].values() for name in each if name.endswith("first_iteration_bytes")]
    assert median(first) <= {"bert": 0.004, "t5": 0.005}[model]
    assert max(first) <= 0.018


def test_the_sum_of_the_gradient_of_the_output_bias_is_the_peak_of_bert() -> None:
    """Runs of 2026, on H100 GPUs: the buffer of that sum is 135 MiB with 15,360 columns and 120 MiB with 7,680."""
    of_2026 = {name: each for name, each in errors()["bert"].items() if "h100" in name}
    assert len(of_2026) == 5
    assert all(abs(each["peak_allocated_bytes"]) < 0.003 for each in of_2026.values())
    assert abs(of_2026["bert/bert_mcore_tp2_pp2/dev_dgx_h100"]["peak_allocated_first_iteration_bytes"]) < 0.0001
