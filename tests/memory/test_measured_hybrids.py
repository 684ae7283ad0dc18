"""Hybrid models with Mamba layers whose memory was measured (tests/data/measured_hybrids.json)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from analyzer.api import read_launch
from analyzer.predict import predict
from analyzer.results import RankMemory
from tests.data_files import data_file

IMBALANCED = "nemotron/nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200/dev_dgx_gb200"
"""Its router becomes unbalanced in the course of the run: the peak grows by more than the optimizer states."""
AUTOTUNED = "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp4_dgx_a100_1N8G/dev_dgx_h100"
"""Triton tunes its kernels in the first iteration, with a buffer that clears the cache and is not counted."""


def _of_record(record: dict[str, Any], folder: Path) -> tuple[RankMemory, dict[str, int]]:
    """Return the predicted memory of the measured rank, which is in the last pipeline stage, and the measured one."""
    world = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"])]
    launch = read_launch([*world, *record["argv"], "--info-gpu", record["gpu"]], environ=record["env"], folder=folder)
    return predict(launch.job).ranks[-1].memory, record["measured"]


def test_measured_memory_is_predicted(tmp_path: Path) -> None:
    peaks = []
    for record in json.loads(data_file("measured_hybrids.json").read_text()):
        predicted, measured = _of_record(record, tmp_path)
        assert abs(predicted.allocated_bytes / measured["allocated_bytes"] - 1) < 0.001, record["id"]
        first = predicted.peak_allocated_first_iteration_bytes / measured["peak_allocated_first_iteration_bytes"] - 1
        assert abs(first) < (0.08 if record["id"] == AUTOTUNED else 0.005), record["id"]
        peaks.append(abs(predicted.peak_allocated_bytes / measured["peak_allocated_bytes"] - 1))
        assert peaks[-1] < (0.11 if record["id"] == IMBALANCED else 0.001), record["id"]
    assert median(peaks) < 0.001
