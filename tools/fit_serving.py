"""Fit the five host times of each serving engine (`analyzer/inference/serving/engines.json`) to measured rows, and print them.

    python tools/fit_serving.py WHEEL [--write] [--rows N] [--without MODEL]

Rows, and models that are kept out, are those of `tools/score_serving.py`. Everything else of a prediction is fixed: kernels from
their tables, steps from what is known of the engine and of the launch. The rows are those of the public benchmark, whose launches
are known. Those of TensorRT-LLM are of a dense model, whose long kernels hide what the host does: the times of its steps and
operations are fitted to the other rows too, and only those outside the steps to the public ones. SGLang has no public rows of
modelled models: only the times of its steps are fitted, and the others are the means of the other engines'. Needs the extra `fit`
(scipy).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
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

STEPS: Final = ("step_seconds", "request_seconds")
OUTSIDE: Final = ("first_seconds", "text_seconds")
TIMES: Final = (*STEPS, "operation_seconds", *OUTSIDE)
START: Final = {
    "step_seconds": 5e-4, "request_seconds": 1e-5, "operation_seconds": 2e-5, "first_seconds": 2e-2, "text_seconds": 2e-6,
}  # fmt: skip
MOST: Final = {
    "step_seconds": 5e-3, "request_seconds": 2e-4, "operation_seconds": 2e-4, "first_seconds": 5e-1, "text_seconds": 3e-5,
}  # fmt: skip
LONG: Final = 5e3
"""Measured first tokens above so many ms wait for room in the cache, and are left out."""


class FixedSteps(StepModel):
    """Steps whose kernels are calculated once."""

    def __init__(self, model: StepModel) -> None:
        self.__dict__.update(model.__dict__)
        self.engine = replace(model.engine, step_seconds=0.0, request_seconds=0.0, operation_seconds=0.0)
        self.known: dict[StepWork, float] = {}

    def with_host(self, engine: Engine, work: StepWork) -> StepSeconds:
        """A step with the host times of an engine."""
        if work not in self.known:
            self.known[work] = super().seconds(work).total
        device = self.known[work]
        issued = self.issued(work) * engine.operation_seconds
        host = engine.step_seconds + engine.request_seconds * (work.requests + work.prompts) + max(0.0, issued - device)
        return StepSeconds(gemm=device, attention=0.0, memory_bound=0.0, communication=0.0, host=host)


class OfRow:
    """The prediction of a row with other host times."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.unit = replica(row.model, row.gpu, row.engine, row.bits, row.layout, (row.prompt, row.generate))
        self.steps = FixedSteps(self.unit.steps)

    def times(self, times: dict[str, Any]) -> tuple[float, float]:
        """Times of the first and of an output token, in ms."""
        engine = replace(self.unit.engine, **times)
        unit = Replica(self.unit.job, engine, self.unit.speed, self.unit.rates)
        unit.__dict__["_fixed_and_token_bytes"] = self.unit._fixed_and_token_bytes
        unit.__dict__["layout"] = self.unit.layout
        steps = FixedSteps.__new__(FixedSteps)
        steps.__dict__.update(self.steps.__dict__)
        steps.seconds = lambda work: self.steps.with_host(engine, work)  # type: ignore[method-assign]
        unit.__dict__["steps"] = steps
        served = unit.serve(ServingSpec(clients=self.row.clients, spread=SPREAD, **dict(self.row.settings)))
        return 1e3 * served.first, 1e3 * served.token


def chosen(wheel: Path, engine: str, number: int, without: str = "") -> list[OfRow]:
    """Rows of an engine without disaggregation, equally from all of them. `without`: a model that is left out."""
    rows = [
        row for row in rows_of(wheel, held=False)
        if row.engine == engine and row.prefill is None and row.clients and row.first < LONG
        and not any(word in row.model for word in UNMODELLED) and not (without and without in row.model)
    ]  # fmt: skip
    found = []
    for row in rows[:: max(1, len(rows) // number)]:
        try:
            found.append(OfRow(row))
        except AnalyzerError as fault:
            print(f"left out: {row.id}: {fault}")
    return found


def fit(rows: list[OfRow], names: tuple[str, ...], known: dict[str, Any]) -> dict[str, float]:
    """The host times `names` of an engine, with the others known.

    Times of the steps alone are fitted to output tokens; times of prompts and outside the steps also to first tokens. All models
    have the same weight.
    """
    if any(not each.row.dense for each in rows if each.row.public):  # without such rows, output tokens of the others are used
        rows = [each for each in rows if each.row.public]
    models = Counter(each.row.model for each in rows)

    def residuals(x: Any) -> Any:
        times = known | {name: float(value) * START[name] for name, value in zip(names, x, strict=True)}
        found = []
        for each in rows:
            first, token = each.times(times)
            weight = (len(rows) / len(models) / models[each.row.model]) ** 0.5
            if "first_seconds" in names:
                found.append(0.5 * weight * np.log(first / each.row.first))
            found.append(weight * np.log(token / each.row.token))
        return np.array(found)

    most = np.array([MOST[name] / START[name] for name in names])
    values = least_squares(
        residuals, np.ones(len(names)), bounds=(np.zeros(len(names)), most), loss="soft_l1", f_scale=0.1, diff_step=0.1, max_nfev=8
    ).x
    return {name: float(f"{value * START[name]:.3g}") for name, value in zip(names, values, strict=True)}


def main() -> None:
    """Fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--engine", action="append", default=[], help="fit this engine only")
    parser.add_argument("--without", default="", help="leave out the rows of a model, to score them")
    args = parser.parse_args()
    document = json.loads(FILE.read_text(encoding="utf-8"))
    outside: list[dict[str, float]] = []
    for engine, entry in document["engines"].items():
        if args.engine and engine not in args.engine:
            outside.append({name: entry[name] for name in ("operation_seconds", *OUTSIDE)})
            continue
        rows = chosen(args.wheel, engine, args.rows, args.without)
        public = [each for each in rows if each.row.public]
        if public:
            found = fit(rows, TIMES, {})
            if len(public) < len(rows):  # what the clients of the others add is not known
                found |= fit(public, OUTSIDE, found)
            outside.append({name: found[name] for name in ("operation_seconds", *OUTSIDE)})
        else:  # no public rows: the means of the other engines
            known = {name: float(f"{sum(each[name] for each in outside) / len(outside):.3g}") for name in outside[0]}
            found = fit(rows, STEPS, known) | known
        entry |= found
        used = public if any(not each.row.dense for each in public) else rows
        models = sorted({each.row.model.split("/")[1] for each in used})
        entry.setdefault("sources", {})["times"] = f"tools/fit_serving.py: {len(used)} rows of {', '.join(models)}"
        print(engine, {name: entry[name] for name in TIMES}, entry["sources"]["times"])
    if args.write:
        FILE.write_text(formatted(document), encoding="utf-8")


def formatted(document: dict[str, Any]) -> str:
    """The text of the file. Lists are in one line."""
    text = json.dumps(document, indent=1)
    short = re.compile(r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]")
    return short.sub(lambda match: re.sub(r"([\[{]) | ([\]}])", r"\1\2", " ".join(match[0].split())), text) + "\n"


if __name__ == "__main__":
    main()
