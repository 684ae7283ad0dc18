"""tools/score.py: quantiles, groups, and the prediction of one measured run through the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data_files import measured_records
from tools.score import Failure, Score, main, predicted, quantile, table, versions_of

RUN = "gpt/gpt3_7b_tp4_pp1_memory_speed/dev_dgx_h100"


def score(predicted: int, *, kind: str = "dense", rare: bool = False) -> Score:
    return Score("run", kind, rare, 0, "peak_allocated_bytes", 1000, predicted)


def test_quantiles_are_values_of_the_list() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([4, 1, 3, 2], 0.9) == 4
    assert quantile([5], 0.9) == 5


def test_groups_do_not_overlap() -> None:
    rows = table([score(1010), score(980), score(1500, kind="moe"), score(0, rare=True)])
    assert [row.split() for row in rows[1:]] == [
        ["dense", "peak", "2", "2.00%", "2.00%", "2.00%"],
        ["MoE", "peak", "1", "50.00%", "50.00%", "50.00%"],
        ["rare", "features", "peak", "1", "100.00%", "100.00%", "100.00%"],
    ]


@pytest.mark.parametrize(
    ("record", "engine", "options"),
    [
        ({"container": "nvcr.io/nvidia/pytorch:26.02-py3"}, "formula", ["--info-torch", "2.11"]),
        ({"container": "nvcr.io/nvidia/pytorch:26.04-py3"}, "shadow", ["--info-torch", "2.12"]),
        ({"container": None}, "formula", []),
        (
            {"software": {"transformer_engine": "2.11.0", "torch": "2.10.0a0"}},
            "formula",
            ["--info-te", "2.11.0", "--info-torch", "2.10.0a0"],
        ),
        ({"software": {"transformer_engine": "2.11.0", "torch": "2.10.0a0"}}, "shadow", ["--info-torch", "2.10.0a0"]),
    ],
)
def test_the_versions_of_a_run_are_stated_or_those_of_its_container(
    record: dict[str, Any], engine: str, options: list[str]
) -> None:
    assert versions_of(record, engine=engine) == options


@pytest.mark.slow
def test_a_measured_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", RUN, "--json", str(tmp_path / "scores.json")]) == 0
    assert "1 runs, 0 without a prediction" in capsys.readouterr().out
    found = json.loads((tmp_path / "scores.json").read_text())
    assert [each["figure"] for each in found] == ["allocated_bytes", "peak_allocated_first_iteration_bytes", "peak_allocated_bytes"]
    assert all(abs(each["error"]) < 0.03 for each in found)


@pytest.mark.slow
def test_a_run_that_is_refused_is_a_failure() -> None:
    record = next(each for each in measured_records() if each["id"] == RUN)
    failure = predicted({**record, "argv": [*record["argv"], "--tensor-model-parallel-size", "3"]}, engine="formula", release=True)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("exit status 2: get-training-info: ")
