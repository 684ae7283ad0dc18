"""Fit the efficiencies of `analyzer/time/efficiencies.json` to measured iterations, and report the errors.

    python tools/fit_time.py [--write] [--left-out] [--records FILE]

Needs the extra `fit` (scipy). The residuals are ln(predicted / measured), softened so that single records do not decide, and
weighted so that each combination of model, GPU and precision counts by the square root of its number of records. Each constant is
held near its prior. `--left-out` also fits once for each model without its records, and reports the errors of the model that was
left out. `--write` stores the constants.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.communication.table import communication_rows
from analyzer.hardware.gpus import hardware
from analyzer.hardware.speeds import speed_of
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.modules.stage import StageModel
from analyzer.passes.stages import stage_models
from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import FILE, from_document, system_of
from analyzer.time.iteration import iteration_time

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests/data/measured_time/iterations.json"


@dataclass(frozen=True)
class Constant:
    """A constant that is fitted: its place in the document, prior, bounds, and width of the prior in ln."""

    place: tuple[str, ...]
    prior: float
    low: float
    high: float
    width: float

    def concerns(self, speed: SpeedSpec) -> bool:
        """Whether the constant is used for a GPU."""
        return self.place[0] == "shared" or self.place[1] in (speed.architecture, speed.name, system_of(speed))


def _gpu(gpu: str, name: str, prior: float, low: float = 0.3, high: float = 0.9, width: float = 0.15) -> Constant:
    return Constant(("gpus", gpu, name), prior, low, high, width)


def _shared(name: str, prior: float, low: float, high: float, width: float) -> Constant:
    return Constant(("shared", name), prior, low, high, width)


CONSTANTS = (
    Constant(("architectures", "ampere", "gemm_16"), 0.78, 0.6, 0.9, 0.05),
    Constant(("architectures", "hopper", "gemm_16"), 0.73, 0.5, 0.9, 0.1),
    Constant(("architectures", "hopper", "gemm_8"), 0.62, 0.4, 0.9, 0.15),
    Constant(("architectures", "blackwell", "gemm_16"), 0.60, 0.4, 0.9, 0.15),
    Constant(("architectures", "blackwell", "gemm_8"), 0.62, 0.4, 0.9, 0.15),
    Constant(("architectures", "blackwell", "gemm_4"), 0.55, 0.2, 0.9, 0.2),
    Constant(("architectures", "ampere", "attention"), 0.60, 0.4, 0.8, 0.1),
    Constant(("architectures", "hopper", "attention"), 0.62, 0.4, 0.8, 0.1),
    Constant(("architectures", "blackwell", "attention"), 0.60, 0.4, 0.8, 0.1),
    _gpu("B200-180GB", "gemm_16", 0.50, width=0.05),
    _gpu("B200-180GB", "gemm_8", 0.62),
    _gpu("B200-180GB", "attention", 0.50, width=0.1),
    _gpu("GB200-186GB", "gemm_8", 0.62),
    _gpu("GB300-288GB", "gemm_8", 0.68),
    _gpu("B300-288GB", "gemm_8", 0.68),
    _gpu("GB300-288GB", "attention", 0.70, width=0.1),
    _gpu("B300-288GB", "attention", 0.70, width=0.1),
    Constant(("systems", "rack", "expert_nvlink_flex"), 0.6, 0.2, 0.9, 0.2),
    _shared("gemm_traffic", 0.5, 0.05, 1.0, 0.3),
    _shared("gemm_half_rows", 180, 60, 400, 0.2),
    _shared("memory", 0.85, 0.6, 0.95, 0.05),
    _shared("memory_permute", 0.55, 0.3, 0.9, 0.2),
    _shared("nvlink", 0.62, 0.3, 0.9, 0.15),
    _shared("network", 0.85, 0.5, 1.0, 0.08),
    _shared("expert_nvlink", 0.55, 0.2, 0.9, 0.2),
    _shared("expert_nvlink_flex", 0.55, 0.2, 0.9, 0.2),
    _shared("expert_network", 0.85, 0.5, 1.0, 0.1),
    _shared("tp_overlap_exposed", 0.2, 0.05, 0.6, 0.3),
    _shared("tp_backward_exposed", 0.6, 0.2, 1.0, 0.15),
    _shared("ep_overlap_exposed", 0.15, 0.03, 0.6, 0.4),
    _shared("slowdown", 0.12, 0.03, 0.4, 0.3),
    _shared("host_call", 17e-6, 8e-6, 30e-6, 0.2),
    _shared("host_sync", 250e-6, 30e-6, 1000e-6, 0.25),
    _shared("iteration", 10e-3, 2e-3, 40e-3, 0.5),
)
SOFTNESS = 0.05
STEP = 0.01
PULL = 0.05


@dataclass(frozen=True)
class Case:
    """A measured iteration with its job."""

    record: dict[str, Any]
    job: TrainingJob
    stages: Sequence[StageModel]
    rows: Sequence[CommunicationRow]
    speed: SpeedSpec

    def error(self, document: dict[str, Any]) -> float:
        """ln(predicted / measured)."""
        found = iteration_time(self.job, self.stages, self.rows, self.speed, from_document(document, self.speed))
        return float(np.log(found.seconds / self.record["measured"]["iteration_seconds"]))


def case_of(record: dict[str, Any]) -> Case:
    """The job of a record."""
    argv = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), *record["argv"]]
    environ = dict(record.get("env", {}))
    arguments, world, _ = parse(argv, environ=environ, folder=ROOT)
    gpu, _ = hardware(record["gpu"], None)
    job = build(arguments, world, environ=environ, gpu=gpu, folder=ROOT)
    stages = stage_models(job)
    speed = speed_of(record["gpu"])
    assert speed is not None
    return Case(record, job, stages, communication_rows(job, stages), speed)


def with_values(document: dict[str, Any], values: Sequence[float]) -> dict[str, Any]:
    """The document with the fitted constants replaced."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for constant, value in zip(CONSTANTS, values, strict=True):
        at = changed
        for part in constant.place[:-1]:
            at = at.setdefault(part, {})
        at[constant.place[-1]] = float(value)
    return changed


def fit(document: dict[str, Any], cases: Sequence[Case]) -> list[float]:
    """Values of `CONSTANTS` for the cases."""
    sizes = collections.Counter(cluster(case.record) for case in cases)
    weights = np.array([sizes[cluster(case.record)] ** -0.5 for case in cases])
    weights *= (len(weights) / (weights**2).sum()) ** 0.5
    priors = np.log([constant.prior for constant in CONSTANTS])
    widths = np.array([constant.width for constant in CONSTANTS])
    low, high = (np.log([getattr(constant, side) for constant in CONSTANTS]) for side in ("low", "high"))

    def residuals(logs: Any) -> Any:
        changed = with_values(document, np.exp(logs))
        errors = np.array([case.error(changed) for case in cases])
        return np.concatenate([errors * weights, PULL * (logs - priors) / widths])

    def derivatives(logs: Any) -> Any:
        """Forward differences. A constant of an architecture or of a GPU changes only the cases on it."""
        base = with_values(document, np.exp(logs))
        errors = [case.error(base) for case in cases]
        columns = np.zeros((len(cases) + len(CONSTANTS), len(CONSTANTS)))
        for column, constant in enumerate(CONSTANTS):
            moved = logs.copy()
            moved[column] += STEP
            changed = with_values(document, np.exp(moved))
            for row, case in enumerate(cases):
                if constant.concerns(case.speed):
                    columns[row, column] = (case.error(changed) - errors[row]) / STEP * weights[row]
            columns[len(cases) + column, column] = PULL / widths[column]
        return columns

    start = np.clip(priors, low + 1e-6, high - 1e-6)
    found = least_squares(residuals, start, jac=derivatives, bounds=(low, high), loss="soft_l1", f_scale=SOFTNESS, max_nfev=12)
    return [float(value) for value in np.exp(found.x)]


def cluster(record: dict[str, Any]) -> tuple[str, str, str]:
    """Records that count together."""
    return record["model"], record["gpu"], record["precision"]


def quantiles(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the absolute errors, and the median error, in percent."""
    ratios = [float(np.exp(error) - 1) for error in errors]
    ordered = sorted(map(abs, ratios))
    tail = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{100 * statistics.median(ordered):5.1f} {100 * tail:5.1f} {100 * statistics.median(ratios):+6.1f} ({len(ordered)})"


def table(title: str, records: Sequence[dict[str, Any]], errors: Sequence[float]) -> None:
    """Errors by kind, source, model and GPU."""
    pairs = list(zip(records, errors, strict=True))

    def of(**wanted: str) -> str:
        return quantiles([error for record, error in pairs if all(record[key] == value for key, value in wanted.items())])

    print(f"{title}: median, 90th percentile and bias in %, number")
    print("  dense", of(kind="dense"), " MoE", of(kind="moe"), " all", of())
    simumax = [abs(float(np.exp(error) - 1)) for record, error in pairs if record["id"].startswith("simumax")]
    if simumax:
        print(f"  simumax mean {100 * statistics.mean(simumax):.1f}")
    medians = []
    for model in sorted({record["model"] for record in records}):
        mine = [abs(float(np.exp(error) - 1)) for record, error in pairs if record["model"] == model]
        medians.append(statistics.median(mine))
        print(f"    {model:18}", of(model=model))
    print(f"  mean of the models' medians {100 * statistics.mean(medians):.1f}")
    for record, precision in sorted({(each["gpu"], each["precision"]) for each in records}):
        print(f"    {record:10} {precision:20}", of(gpu=record, precision=precision))


def _interval(errors: Sequence[float]) -> dict[str, float]:
    """The 5th and the 95th percentile of predicted / measured - 1."""
    lower, upper = np.quantile(np.exp(errors) - 1, [0.05, 0.95])
    return {"lower": round(float(lower), 3), "upper": round(float(upper), 3)}


_WORKER: dict[str, Any] = {}


def _without(model: str) -> tuple[str, list[float], list[float]]:
    """The constants fitted without a model, and the errors of its records."""
    cases: list[Case] = _WORKER["cases"]
    document = _WORKER["document"]
    values = fit(document, [case for case in cases if case.record["model"] != model])
    changed = with_values(document, values)
    return model, values, [case.error(changed) for case in cases if case.record["model"] == model]


def _start(document: dict[str, Any], path: Path) -> None:
    _WORKER["document"] = document
    _WORKER["cases"] = [case_of(record) for record in json.loads(path.read_text())]


def main() -> None:
    """Fits, and prints errors and constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="store the constants")
    parser.add_argument("--left-out", action="store_true", help="also fit without each model")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    document = json.loads(FILE.read_text())
    _start(document, args.records)
    cases: list[Case] = _WORKER["cases"]
    records = [case.record for case in cases]
    values = fit(document, cases)
    changed = with_values(document, values)
    table("fitted on all records", records, [case.error(changed) for case in cases])
    for constant, value in zip(CONSTANTS, values, strict=True):
        bound = " at its bound" if min(abs(value / constant.low - 1), abs(value / constant.high - 1)) < 0.01 else ""
        print(f"  {'.'.join(constant.place[1:]):36} {value:.4g} (prior {constant.prior:.4g}){bound}")
    if args.left_out:
        models = sorted({record["model"] for record in records})
        with ProcessPoolExecutor(args.jobs, initializer=_start, initargs=(document, args.records)) as pool:
            outcome = list(pool.map(_without, models))
        pairs = [
            (record, error)
            for model, _, errors in outcome
            for record, error in zip((each for each in records if each["model"] == model), errors, strict=True)
        ]
        table("each model left out of the fit", [record for record, _ in pairs], [error for _, error in pairs])
        changed["errors"] = changed["errors"] | {
            kind: _interval([error for record, error in pairs if record["kind"] == kind]) for kind in ("dense", "moe")
        }
    for constant in CONSTANTS:
        mine = [case.record for case in cases if constant.concerns(case.speed)]
        where = f"tools/fit_time.py: {len(mine)} measured iterations of {len({record['model'] for record in mine})} models"
        changed["sources"][".".join(constant.place)] = where + f", prior {constant.prior:g}"
    if args.write:
        FILE.write_text(json.dumps(changed, indent=1) + "\n")


if __name__ == "__main__":
    main()
