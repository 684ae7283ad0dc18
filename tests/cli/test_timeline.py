"""`--info-timeline`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import assert_refused, run

LAUNCH = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --pipeline-model-parallel-size 2"
).split()


def test_the_timeline_ends_with_the_iteration_of_the_report(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    outcome = run(*LAUNCH, "--info-gpu", "H100-80GB", "--info-timeline", str(file), "--info-json", "-")
    assert (outcome.status, outcome.err) == (0, "")
    document = json.loads(file.read_text())
    seconds = outcome.report["time"]["iteration_seconds"]
    assert document["otherData"]["iteration_seconds"] == seconds
    ends = [event["ts"] + event["dur"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * seconds)
    assert {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"} == {
        "stage 0: 4 ranks",
        "stage 1: 4 ranks",
    }


def test_a_timeline_needs_the_speeds_of_a_gpu(tmp_path: Path) -> None:
    file = str(tmp_path / "timeline.json")
    assert_refused(run(*LAUNCH, "--info-timeline", file), "--info-timeline")
    outcome = run(*LAUNCH, "--info-timeline", file, "--info-gpu", "H100-80GB", "--info-efficiency", "flops=0.5")
    assert_refused(outcome, "--info-timeline")
    assert "does not use the simple time model of --info-efficiency" in outcome.err
    assert not Path(file).exists()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    outcome = run(*LAUNCH, "--info-gpu", "H100-80GB", "--info-timeline", str(tmp_path / "none" / "file.json"))
    assert_refused(outcome, "--info-timeline")
    assert "cannot write" in outcome.err


def test_a_search_has_no_timeline(tmp_path: Path) -> None:
    outcome = run(*LAUNCH, "--info-gpu", "H100-80GB", "--info-search", "--info-timeline", str(tmp_path / "file.json"))
    assert_refused(outcome, "--info-timeline")
    assert "cannot be used with a search" in outcome.err
