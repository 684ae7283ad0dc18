"""Predictions of serving beside measured rows, of models that `tools/score_serving.py` does not hold out."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from analyzer.specs.serving import ServingSpec
from tools.score_serving import SPREAD, replica
from tools.serving_settings import Run, other_settings, settings_of

ROWS = json.loads((Path(__file__).parents[2] / "data" / "serving_rows.json").read_text(encoding="utf-8"))["rows"]


def errors(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Median errors of the first and of an output token."""
    first, token = [], []
    for row in rows:
        layout = tuple(row["layout"])
        unit = replica(row["model"], row["gpu"], row["engine"], row["bits"], layout, (row["prompt"], row["generate"]))
        names = {name: row[name] for name in ("model", "gpu", "engine", "prompt", "generate", "clients", "bits")}
        run = Run(layout=layout, date=row.get("date", ""), **names)  # rows of the public benchmark have a date
        settings = settings_of(run) if run.date else other_settings(run)
        found = unit.serve(ServingSpec(clients=row["clients"], spread=SPREAD, **settings))
        first.append(abs(1e3 * found.first / row["first"] - 1))
        token.append(abs(1e3 * found.token / row["token"] - 1))
    return statistics.median(first), statistics.median(token)


def test_dense_models() -> None:
    first, token = errors([row for row in ROWS if "Llama-3.1-70B" in row["model"] and row["clients"] <= 64][::2])
    assert token < 0.1
    assert first < 0.15


@pytest.mark.slow
def test_models_with_experts() -> None:
    first, token = errors([row for row in ROWS if "Llama" not in row["model"]])
    assert token < 0.15
    assert first < 0.2
