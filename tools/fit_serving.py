"""Fit the five host times of each serving engine (`analyzer/inference/serving/engines.json`) to measured rows, and print them.

    python tools/fit_serving.py WHEEL [--write] [--rows N]

Rows, and models that are kept out, are those of `tools/score_serving.py`. Everything else of a prediction is fixed: kernels from
their tables, steps from what is known of the engine. Needs the extra `fit` (scipy).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.errors import AnalyzerError
from analyzer.inference.results import StepSeconds
from analyzer.inference.serving.engines import FILE, Engine
from analyzer.inference.serving.estimate import Replica
from analyzer.inference.serving.step import StepModel, StepWork
from analyzer.specs.serving import ServingSpec
from tools.score_serving import SPREAD, UNMODELLED, Row, replica, rows_of

TIMES: Final = ("step_seconds", "request_seconds", "first_seconds", "client_seconds", "layer_seconds")
START: Final = (5e-4, 1e-5, 2e-2, 1e-4, 2e-4)
MOST: Final = (5e-3, 2e-4, 2e-1, 2e-3, 2e-3)
LONG: Final = 5e3
"""Measured first tokens above so many ms wait for room in the cache, and are left out."""


class FixedSteps(StepModel):
    """Steps whose kernels are calculated once."""

    def __init__(self, model: StepModel) -> None:
        self.__dict__.update(model.__dict__)
        self.engine = replace(model.engine, step_seconds=0.0, request_seconds=0.0, layer_seconds=0.0)
        self.known: dict[StepWork, float] = {}

    def with_host(self, engine: Engine, work: StepWork) -> StepSeconds:
        """A step with the host times of an engine."""
        if work not in self.known:
            self.known[work] = super().seconds(work).total
        device = self.known[work]
        issued = self.layout.model.num_layers * engine.layer_seconds if work.prompt_tokens else 0.0
        host = engine.step_seconds + engine.request_seconds * (work.requests + work.prompts) + max(0.0, issued - device)
        return StepSeconds(gemm=device, attention=0.0, memory_bound=0.0, communication=0.0, host=host)


class OfRow:
    """The prediction of a row with other host times."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.unit = replica(row.model, row.gpu, row.engine, row.bits, row.layout, (row.prompt, row.generate))
        self.steps = FixedSteps(self.unit.steps)

    def times(self, values: Any) -> tuple[float, float]:
        """Times of the first and of an output token, in ms."""
        times: dict[str, Any] = dict(zip(TIMES, map(float, values), strict=True))
        engine = replace(self.unit.engine, **times)
        unit = Replica(self.unit.job, engine, self.unit.speed, self.unit.rates)
        unit.__dict__["_fixed_and_token_bytes"] = self.unit._fixed_and_token_bytes
        unit.__dict__["layout"] = self.unit.layout
        steps = FixedSteps.__new__(FixedSteps)
        steps.__dict__.update(self.steps.__dict__)
        steps.seconds = lambda work: self.steps.with_host(engine, work)  # type: ignore[method-assign]
        unit.__dict__["steps"] = steps
        served = unit.serve(ServingSpec(clients=self.row.clients, spread=SPREAD))
        return 1e3 * served.first, 1e3 * served.token


def chosen(wheel: Path, engine: str, number: int) -> list[OfRow]:
    """Rows of an engine without disaggregation, equally from all of them."""
    rows = [
        row for row in rows_of(wheel, held=False)
        if row.engine == engine and row.prefill is None and row.clients and row.first < LONG
        and not any(word in row.model for word in UNMODELLED)
    ]  # fmt: skip
    found = []
    for row in rows[:: max(1, len(rows) // number)]:
        try:
            found.append(OfRow(row))
        except AnalyzerError as fault:
            print(f"left out: {row.id}: {fault}")
    return found


def fit(rows: list[OfRow]) -> Any:
    """The host times of an engine."""

    def residuals(x: Any) -> Any:
        found = []
        for each in rows:
            first, token = each.times(x * np.array(START))
            found += [0.5 * np.log(first / each.row.first), np.log(token / each.row.token)]
        return np.array(found)

    most = np.array(MOST) / np.array(START)
    return least_squares(
        residuals, np.ones(len(START)), bounds=(np.zeros(len(START)), most), loss="soft_l1", f_scale=0.1, diff_step=0.1, max_nfev=8
    ).x * np.array(START)


def main() -> None:
    """Fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--engine", action="append", default=[])
    args = parser.parse_args()
    document = json.loads(FILE.read_text(encoding="utf-8"))
    for engine, entry in document["engines"].items():
        if args.engine and engine not in args.engine:
            continue
        rows = chosen(args.wheel, engine, args.rows)
        found = fit(rows)
        models = sorted({each.row.model.split("/")[1] for each in rows})
        entry |= {name: float(f"{value:.3g}") for name, value in zip(TIMES, found, strict=True)}
        entry.setdefault("sources", {})["times"] = f"tools/fit_serving.py: {len(rows)} rows of {', '.join(models)}"
        print(engine, {name: entry[name] for name in TIMES}, entry["sources"]["times"])
    if args.write:
        text = json.dumps(document, indent=1)
        FILE.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
