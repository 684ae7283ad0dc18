"""Errors of the predictions for measured runs of Megatron-LM, relative to what the GPUs reported.

    python tools/score.py [--engine shadow] [--jobs 2] [--only TEXT] [--show 12] [--without-release] [--json FILE] [RECORDS ...]

Without files it reads tests/data/measured. Each record is one run: its launch command, and the bytes that
torch.cuda.memory_stats() reported on one rank or more. The launch is predicted by get_training_info.py in a process of its own,
with the Megatron release and the versions of libraries that the record names. Exit status 1: a run has no prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.launch.software import CONTAINERS  # noqa: E402
from tests.data_files import measured_records  # noqa: E402

FIGURES: Final = {
    "allocated_bytes": "allocated after a step",
    "peak_allocated_first_iteration_bytes": "peak of the first iteration",
    "peak_allocated_bytes": "peak",
    "peak_reserved_bytes": "reserved",
}
"""Of a rank's memory in the JSON report, and their names in the table."""


@dataclass(frozen=True)
class Score:
    """One figure of one rank of one run."""

    id: str
    kind: str
    rare: bool
    rank: int
    figure: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Relative; below 0 where too little is predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Failure:
    """A run without a prediction."""

    id: str
    reason: str


GROUPS: Final[dict[str, Callable[[Score], bool]]] = {
    "dense": lambda score: score.kind == "dense" and not score.rare,
    "MoE": lambda score: score.kind == "moe" and not score.rare,
    "rare features": lambda score: score.rare,
}


def measured_of(record: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Measured bytes by global rank."""
    if "measured" in record:
        return {record["rank"]: record["measured"]}
    return {int(rank): measured for rank, measured in record["measured_per_rank"].items()}


def predicted(record: dict[str, Any], *, engine: str, release: bool) -> dict[str, Any] | Failure:
    """The JSON report for the launch of a record."""
    command = [sys.executable, str(ROOT / "get_training_info.py")]
    command += ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), *record["argv"]]
    if release and record.get("megatron_release"):
        command += ["--info-megatron", record["megatron_release"]]
    if release:
        command += versions_of(record, engine=engine)
    command += ["--info-engine", engine, "--info-gpu", record["gpu"], "--info-json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **record["env"]})
    if done.returncode not in (0, 1):
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return Failure(record["id"], f"exit status {done.returncode}: {last[:200]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def versions_of(record: dict[str, Any], *, engine: str) -> list[str]:
    """The options for the libraries of a run: the versions that it states, or PyTorch of its container.

    Megatron-LM's CI builds a Transformer Engine of its own. The shadow engine runs the one that is installed.
    """
    software = record.get("software")
    if software is not None:
        te = ["--info-te", software["transformer_engine"]] if engine == "formula" else []
        return [*te, "--info-torch", software["torch"]]
    tag = (record.get("container") or "").removeprefix("nvcr.io/nvidia/pytorch:").removesuffix("-py3")
    torch = next((each.torch for each in CONTAINERS.values() if each.tag == tag), None)
    return ["--info-torch", torch] if torch is not None else []


def scores_of(record: dict[str, Any], *, engine: str, release: bool) -> list[Score] | Failure:
    """Every measured figure of a run beside its prediction."""
    report = predicted(record, engine=engine, release=release)
    if isinstance(report, Failure):
        return report
    found = []
    for rank, measured in measured_of(record).items():
        memory = next(each["memory"] for each in report["ranks"] if any(first <= rank <= last for first, last in each["ranks"]))
        for figure in FIGURES:
            if measured.get(figure):
                values = (record["id"], record["kind"], bool(record["rare"]), rank, figure, measured[figure], memory[figure])
                found.append(Score(*values))
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(scores: Sequence[Score]) -> list[str]:
    """Median, 90 % quantile and worst absolute error of each figure, by group."""
    lines = [f"{'':13} {'figure':28} {'figures':>7} {'median':>8} {'90 %':>8} {'worst':>8}"]
    for group, belongs in GROUPS.items():
        for figure, name in FIGURES.items():
            errors = [abs(score.error) for score in scores if belongs(score) and score.figure == figure]
            if errors:
                median, most, worst = quantile(errors, 0.5), quantile(errors, 0.9), max(errors)
                lines.append(f"{group:13} {name:28} {len(errors):7} {median:8.2%} {most:8.2%} {worst:8.2%}")
    return lines


def worst(scores: Sequence[Score], number: int) -> list[str]:
    """The largest errors of any figure."""
    ordered = sorted(scores, key=lambda score: -abs(score.error))[:number]
    return [
        f"{score.error:+8.2%}  {FIGURES[score.figure]:28} measured {score.measured / 2**30:6.2f} GiB, "
        f"predicted {score.predicted / 2**30:6.2f} GiB  rank {score.rank}  {score.id}"
        for score in ordered
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="*", type=Path, help="files of records; tests/data/measured without any")
    parser.add_argument("--engine", default="formula", choices=("formula", "shadow"))
    parser.add_argument("--jobs", type=int, default=2, help="predictions at the same time")
    parser.add_argument("--only", default="", help="a part of the id of the runs to predict")
    parser.add_argument("--show", type=int, default=12, help="how many of the largest errors to list")
    parser.add_argument("--without-release", action="store_true", help="do not give --info-megatron")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(argv)
    listed = [json.loads(file.read_text()) for file in options.records]
    records = [record for file in listed for record in file] if listed else measured_records()
    records = [record for record in records if options.only in record["id"]]
    work = partial(scores_of, engine=options.engine, release=not options.without_release)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(work, records))
    failures = [result for result in results if isinstance(result, Failure)]
    scores = [score for result in results if not isinstance(result, Failure) for score in result]
    print(*table(scores), sep="\n")
    print(*worst(scores, options.show), sep="\n")
    for failure in failures:
        print(f"no prediction: {failure.id}: {failure.reason}")
    print(f"{len(records)} runs, {len(failures)} without a prediction")
    if options.json:
        options.json.write_text(json.dumps([{**asdict(score), "error": score.error} for score in scores], indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
