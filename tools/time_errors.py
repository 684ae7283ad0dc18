"""Print the errors of predicted iteration times as the tables of docs/time.md: `python tools/time_errors.py`.

For each measured iteration of tests/data/measured_time/iterations.json the prediction with the shipped efficiencies is compared
with the measured time: by GPU, precision and kind, and the ten worst. The simple model of `--info-efficiency
flops=0.5,memory=0.9` is evaluated on the same records.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.api import analyze

RECORDS = Path(__file__).resolve().parent.parent / "tests/data/measured_time/iterations.json"
SIMPLE = "--info-efficiency flops=0.5,memory=0.9"


def predicted(record: dict[str, object], *, more: str = "") -> float:
    """Seconds of an iteration."""
    words = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"])]
    words += [*record["argv"], *more.split()]  # type: ignore[misc]
    time = analyze(words, gpu=str(record["gpu"]), environ=dict(record.get("env", {}))).time  # type: ignore[call-overload]
    assert time is not None
    return time.iteration_seconds


def cell(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the absolute errors, median error and number."""
    ordered = sorted(map(abs, errors))
    tail = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{statistics.median(ordered):.1%} | {tail:.1%} | {statistics.median(errors):+.1%} | {len(errors)}"


def main() -> None:
    """Print the tables."""
    records = json.loads(RECORDS.read_text())
    measured = [record["measured"]["iteration_seconds"] for record in records]
    errors = [predicted(record) / real - 1 for record, real in zip(records, measured, strict=True)]
    simple = [predicted(record, more=SIMPLE) / real - 1 for record, real in zip(records, measured, strict=True)]
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record, error in zip(records, errors, strict=True):
        groups[record["kind"], record["gpu"], record["precision"]].append(error)
    print("| kind | GPU | precision | median | 90th percentile | bias | records |\n| --- | --- | --- | --- | --- | --- | --- |")
    for (kind, gpu, precision), mine in sorted(groups.items()):
        print(f"| {kind} | {gpu} | {precision} | {cell(mine)} |")
    for title, values in (("this model", errors), (SIMPLE, simple)):
        for kind in ("dense", "moe"):
            mine = [error for record, error in zip(records, values, strict=True) if record["kind"] == kind]
            print(f"{title}, {kind}: {cell(mine)}")
    worst = sorted(zip(records, measured, errors, strict=True), key=lambda each: -abs(each[2]))[:10]
    for record, real, error in worst:
        print(f"| {record['id']} | {real:.2f} s | {error:+.0%} |")


if __name__ == "__main__":
    main()
