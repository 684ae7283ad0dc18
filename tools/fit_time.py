"""Fit the efficiencies of `analyzer/time/efficiencies.json` to measured iterations, and report the errors.

    python tools/fit_time.py [--write] [--left-out] [--records FILE]

Needs the extra `fit` (scipy). Kernels have their shape and their ceilings from `kernels/tables.json`; what is fitted is how a
training differs from kernels that are measured alone: its clock, the memory traffic, links, overlap and the host. The residuals are
ln(predicted / measured), softened so that single records do not decide, and weighted so that each combination of model, GPU and
precision counts by the square root of its number of records. Each constant is held near its prior. Records with `"fit": false` are
predicted only: options of their launch are not known for certain.

`--left-out` also fits once without each model, each GPU and each source, and reports the errors of what was left out. The ranges of
reports are the quantiles of these errors. `--write` stores constants and ranges.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
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
from analyzer.time.efficiencies import FILE, from_document
from analyzer.time.iteration import IterationTime, iteration_time
from analyzer.time.training_range import HOST_BOUND

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests/data/measured_time/iterations.json"
REPORTS = RECORDS.with_name("reports.json")


@dataclass(frozen=True)
class Constant:
    """A constant that is fitted: its place in the document, prior, bounds, and width of the prior in ln."""

    place: tuple[str, ...]
    prior: float
    low: float
    high: float
    width: float

    def concerns(self, case: Case) -> bool:
        """Whether the constant can change the time of a case."""
        name, job = self.place[-1], case.job
        if name in OF_EXPERTS:
            return job.model.moe is not None
        if name == "cublas_4":
            return job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4"
        if self.place[0] != "shared":
            return self.place[1] in (case.speed.architecture, case.speed.name)
        return not any(
            other.place[-1] == name and other.place[1] in (case.speed.architecture, case.speed.name) for other in CONSTANTS
        )


def _shared(name: str, prior: float, low: float, high: float, width: float) -> Constant:
    return Constant(("shared", name), prior, low, high, width)


CONSTANTS = (
    _shared("clock", 0.82, 0.6, 1.0, 0.05),
    Constant(("architectures", "hopper", "clock"), 0.82, 0.6, 1.0, 0.05),
    _shared("cublas_4", 1.25, 1.0, 1.6, 0.1),
    _shared("memory", 0.8, 0.6, 0.95, 0.05),
    _shared("memory_permute", 0.5, 0.3, 0.9, 0.2),
    _shared("nvlink", 0.68, 0.3, 0.9, 0.1),
    _shared("network", 0.8, 0.4, 1.0, 0.1),
    _shared("expert_nvlink", 0.55, 0.2, 0.9, 0.2),
    _shared("expert_network", 0.8, 0.4, 1.0, 0.1),
    _shared("ep_overlap_exposed", 0.08, 0.02, 0.5, 0.3),
    _shared("slowdown", 0.1, 0.02, 0.4, 0.3),
    _shared("host_call", 30e-6, 10e-6, 80e-6, 0.2),
)
"""What is fitted. Priors: NCCL tests on NVLink (0.7 of its bandwidth, all-to-all 0.6), copies (0.85 of the memory bandwidth), FP4
of cuBLAS 12.9 (faster than the inference kernels of the tables); the others are wide."""
OF_EXPERTS = frozenset({"memory_permute", "expert_nvlink", "expert_network", "ep_overlap_exposed"})
"""Constants of MoE layers."""
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

    def time(self, document: dict[str, Any]) -> IterationTime:
        """The predicted iteration."""
        return iteration_time(self.job, self.stages, self.rows, self.speed, from_document(document, self.speed))

    def error(self, document: dict[str, Any]) -> float:
        """ln(predicted / measured)."""
        return float(np.log(self.time(document).seconds / self.record["measured"]["iteration_seconds"]))

    @property
    def is_fitted(self) -> bool:
        """Whether the record takes part in fits."""
        return bool(self.record.get("fit", True))


def case_of(record: dict[str, Any]) -> Case:
    """The job of a record."""
    argv = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), *record["argv"]]
    return _case(record, argv, dict(record.get("env", {})), record["gpu"])


def case_of_report(report: dict[str, Any]) -> Case:
    """The job of a launch of a public report, whose command names the GPU."""
    measured = {"iteration_seconds": report["measured"]["time_s"]}
    return _case({"measured": measured}, shlex.split(report["argv"]), report["env"], None)


def _case(record: dict[str, Any], argv: Sequence[str], environ: dict[str, str], gpu_name: str | None) -> Case:
    arguments, world, options = parse(argv, environ=environ, folder=ROOT)
    name = gpu_name or options.gpu
    assert name is not None
    gpu, _ = hardware(name, None)
    job = build(arguments, world, environ=environ, gpu=gpu, folder=ROOT)
    stages = stage_models(job)
    speed = speed_of(name)
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


def fit(document: dict[str, Any], cases: Sequence[Case], begin: Sequence[float] | None = None) -> list[float]:
    """Values of `CONSTANTS` for the cases. The search begins at `begin`, or at the priors."""
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
        """Forward differences. A constant of an architecture, of experts or of a precision changes only the cases with it."""
        base = with_values(document, np.exp(logs))
        errors = [case.error(base) for case in cases]
        columns = np.zeros((len(cases) + len(CONSTANTS), len(CONSTANTS)))
        for column, constant in enumerate(CONSTANTS):
            moved = logs.copy()
            moved[column] += STEP
            changed = with_values(document, np.exp(moved))
            for row, case in enumerate(cases):
                if constant.concerns(case):
                    columns[row, column] = (case.error(changed) - errors[row]) / STEP * weights[row]
            columns[len(cases) + column, column] = PULL / widths[column]
        return columns

    start = np.clip(priors if begin is None else np.log(begin), low + 1e-6, high - 1e-6)
    found = least_squares(
        residuals, start, jac=derivatives, bounds=(low, high), loss="soft_l1", f_scale=SOFTNESS, max_nfev=12 if begin is None else 6
    )
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


LEFT_OUT: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda record: str(record["model"]),
    "gpu": lambda record: str(record["gpu"]),
    "source": lambda record: str(record["id"]).split("-", 1)[0],
}
"""What is left out of a fit as a whole."""
_WORKER: dict[str, Any] = {}


def _interval(errors: Sequence[float]) -> dict[str, float]:
    """The 5th and the 95th percentile of predicted / measured - 1."""
    lower, upper = np.quantile(np.exp(errors) - 1, [0.05, 0.95])
    return {"lower": round(float(lower), 3), "upper": round(float(upper), 3), "iterations": len(errors)}


def _without(left: tuple[str, str]) -> list[tuple[str, int, float, bool]]:
    """The errors of the records of a model, GPU or source after a fit without them, and whether the host limits them."""
    kind, name = left
    cases: list[Case] = _WORKER["cases"]
    document = _WORKER["document"]
    of = LEFT_OUT[kind]
    others = [case for case in cases if case.is_fitted and of(case.record) != name]
    changed = with_values(document, fit(document, others, _WORKER["values"]))
    found = []
    for place, case in enumerate(cases):
        if of(case.record) == name:
            time = case.time(changed)
            found.append((kind, place, case.error(changed), time.parts["host"] > HOST_BOUND * time.seconds))
    return found


def left_out(
    records: Sequence[dict[str, Any]], document: dict[str, Any], values: Sequence[float], path: Path, jobs: int
) -> dict[str, dict[str, float]]:
    """Prints the errors of what was left out. Returns their intervals by kind. `values`: those fitted to all."""
    lefts = [(kind, name) for kind, of in LEFT_OUT.items() for name in sorted({of(record) for record in records})]
    errors: dict[str, dict[int, float]] = {kind: {} for kind in LEFT_OUT}
    limited: list[float] = []
    with ProcessPoolExecutor(jobs, initializer=_start, initargs=(document, path, values)) as pool:
        for found in pool.map(_without, lefts):
            for kind, place, error, host in found:
                errors[kind][place] = error
                limited += [error] if host and kind != "gpu" else []
    for kind, of_kind in errors.items():
        table(f"each {kind} left out of the fit", records, [of_kind[place] for place in range(len(records))])
    intervals = {}
    for kind in ("dense", "moe"):
        mine = [place for place, record in enumerate(records) if record["kind"] == kind]
        intervals[kind] = _interval([errors[left][place] for left in ("model", "source") for place in mine])
        intervals[f"{kind}_on_another_gpu"] = _interval([errors["gpu"][place] for place in mine])
    intervals["host_bound"] = _interval([*limited, *_reports(with_values(document, values))])
    return intervals


def _reports(document: dict[str, Any]) -> list[float]:
    """ln(predicted / measured) of the launches of public reports that the host limits. They take part in no fit."""
    reports = [each for each in json.loads(REPORTS.read_text()) if each["measured"].get("time_s")]
    found = []
    for case in map(case_of_report, reports):
        time = case.time(document)
        if time.parts["host"] > HOST_BOUND * time.seconds:
            found.append(case.error(document))
    return found


def _start(document: dict[str, Any], path: Path, values: Sequence[float] | None = None) -> None:
    _WORKER["document"], _WORKER["values"] = document, values
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
    fitted = [case for case in cases if case.is_fitted]
    values = fit(document, fitted)
    changed = with_values(document, values)
    table("fitted", [case.record for case in fitted], [case.error(changed) for case in fitted])
    table("all records", records, [case.error(changed) for case in cases])
    for constant, value in zip(CONSTANTS, values, strict=True):
        bound = " at its bound" if min(abs(value / constant.low - 1), abs(value / constant.high - 1)) < 0.01 else ""
        print(f"  {'.'.join(constant.place):30} {value:.4g} (prior {constant.prior:.4g}){bound}")
    if args.left_out:
        gpus = sorted({case.speed.name for case in fitted})
        changed["errors"] = {"gpus": gpus, "intervals": left_out(records, document, values, args.records, args.jobs)}
    changed["sources"] = {name: text for name, text in changed["sources"].items() if not text.startswith("tools/fit_time.py")}
    for constant in CONSTANTS:
        mine = [case.record for case in fitted if constant.concerns(case)]
        where = f"tools/fit_time.py: {len(mine)} measured iterations of {len({record['model'] for record in mine})} models"
        changed["sources"][".".join(constant.place)] = where + f", prior {constant.prior:g}"
    if args.write:
        FILE.write_text(json.dumps(changed, indent=1) + "\n")


if __name__ == "__main__":
    main()
