"""Fit the rates of analyzer/inference/offload/machine.json to measured runs, and print them: `python tools/fit_offload.py`.

The rates of the GPU are fitted to the runs of OPT-6.7B, which needs no host. With these, the rates of the host are fitted to the
runs of OPT-30B with prompts other than 512 tokens. Needs scipy (extra fit).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scipy.optimize import least_squares

from analyzer.inference.offload.machine import FILE, Machine, machine_of
from tools.score_offload import TESTED, Record, records, score

OF_GPU: Final = ("gemm", "memory", "decompress_passes")
OF_HOST: Final = ("staging_gb_per_s", "cpu_attention_gb_per_s", "unstaging_gb_per_s")
SCALE: Final = 0.05
"""Relative error from which a run counts less than with its square."""


def with_rates(values: Mapping[str, float]) -> Machine:
    """The machine of the runs with other rates. Compression takes as long as decompression."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    for name, value in values.items():
        data["rates"][name]["value"] = value
    if "decompress_passes" in values:
        data["rates"]["compress_passes"]["value"] = values["decompress_passes"]
    return machine_of("T4", data=data)


def fitted(names: Sequence[str], runs: Sequence[Record], others: Mapping[str, float]) -> dict[str, float]:
    """The values with which the runs are predicted best, and the others."""
    rates = json.loads(FILE.read_text(encoding="utf-8"))["rates"]
    start = [float(rates[name]["value"]) for name in names]

    def values(logs: Sequence[float]) -> dict[str, float]:
        return {**others, **{name: first * math.exp(log) for name, first, log in zip(names, start, logs, strict=True)}}

    def errors(logs: Sequence[float]) -> list[float]:
        machine = with_rates(values(logs))
        return [math.log1p(score(run, machine).error) for run in runs]

    return values(least_squares(errors, [0.0] * len(names), loss="soft_l1", f_scale=SCALE).x)


def main() -> None:
    """Print the rates."""
    runs = records(published=True)
    found = fitted(OF_GPU, [run for run in runs if run["model"] == "opt-6.7b"], {})
    found = fitted(OF_HOST, [run for run in runs if run["model"] == "opt-30b" and run["prompt_len"] != TESTED], found)
    for name, value in found.items():
        print(f"{name:24} {value:.3g}")


if __name__ == "__main__":
    main()
