"""Verdicts of launches whose iterations were measured. They ran, so none may be predicted not to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.api import read_launch
from analyzer.memory.ranks import highest_rank, rank_classes
from analyzer.memory.verdict import verdict
from analyzer.results import Verdict
from tests.data_files import data_file

MODELS = ("llama3-70b", "llama3.1-405b", "gpt3-175b", "deepseek-v3")
"""The models whose launches fill a GPU most."""
WITHOUT_GRADIENT_TYPE = "mlperf-v5.1-NVIDIA-theia_ngpu512_ngc25.09_nemo-llama31_405b"
"""The log of this launch does not say that gradients are in bf16, as they are in NVIDIA's implementation of MLPerf."""


def _records() -> list[dict[str, Any]]:
    """Return one record for each launch of `MODELS`."""
    records: list[dict[str, Any]] = json.loads(data_file("measured_time/iterations.json").read_text())
    chosen = [record for record in records if record["model"] in MODELS]
    return list({(*record["argv"], record["gpu"], record["nodes"]): record for record in chosen}.values())


def _verdict(record: dict[str, Any], folder: Path, *options: str) -> Verdict:
    world = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"])]
    launch = read_launch([*world, *record["argv"], *options, "--info-gpu", record["gpu"]], environ=record["env"], folder=folder)
    found = verdict([highest_rank(launch.job)], launch.job.hardware)
    return found if found.fits else verdict(rank_classes(launch.job), launch.job.hardware)  # with unused segments freed


def test_a_launch_of_each_model_is_predicted_to_fit(tmp_path: Path) -> None:
    first = {record["model"]: record for record in reversed(_records())}
    assert set(first) == set(MODELS)
    assert [record["id"] for record in first.values() if _verdict(record, tmp_path).state == "does not fit"] == []


@pytest.mark.slow
def test_launches_that_ran_are_predicted_to_fit(tmp_path: Path) -> None:
    records = _records()
    assert len(records) > 50
    wrong = [record for record in records if _verdict(record, tmp_path).state == "does not fit"]
    assert [record["id"] for record in wrong] == [WITHOUT_GRADIENT_TYPE]
    assert _verdict(wrong[0], tmp_path, "--grad-reduce-in-bf16").state != "does not fit"
