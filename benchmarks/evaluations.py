"""Evaluations a second at five levels of effort.

- screen: the lower bound of the memory
- bounds: the lower bounds of the memory and the time, as in a search
- exact: the exact memory of the highest-memory rank
- memory and time: the same and the time of an iteration, as in a search
- report: the full report

    python -m benchmarks.evaluations [LAYOUTS]

Each level evaluates so many distinct layouts (3,000 by default) of two models on 1,024 GPUs, in random order, in a process of its
own, so that every cache is empty at the start. Time is CPU time of one core. Ratios are those to the full report.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Final

from analyzer.layout_search.bounds import SplitFigures, bounds
from analyzer.layout_search.evaluation import evaluate
from analyzer.layout_search.problem import Problem
from analyzer.layout_search.space import Layout, Recompute, Split, Stages
from analyzer.memory.ranks import highest_rank
from analyzer.memory.screen import screen
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from benchmarks.layouts import DEEPSEEK_V3, LLAMA_3_70B, layouts, problem

MODELS: Final = {"Llama-3-70B": LLAMA_3_70B, "DeepSeek-V3": DEEPSEEK_V3}
LAYOUTS: Final = 3000
REPORTS: Final = 20
"""A full report is slow: one in so many layouts is evaluated."""


def _screen(job: TrainingJob, _: Problem) -> int:
    return screen(job).device_bytes


def _bounds(job: TrainingJob, launch: Problem) -> int:
    bounds(job, SplitFigures(job, launch.speed, launch.rates), launch.speed, launch.rates)
    return screen(job).device_bytes


def _exact(job: TrainingJob, _: Problem) -> int:
    return highest_rank(job).memory.device_bytes


def _memory_and_time(job: TrainingJob, launch: Problem) -> float:
    found = evaluate(_ANY, {}, job, launch.speed, launch.rates)
    return inf if found is None else found.device_bytes


def _report(job: TrainingJob, _: Problem) -> int:
    return max(rank.memory.device_bytes for rank in predict(job).ranks)


_ANY: Final = Layout(0, Split(), Stages(), Recompute())
"""The layout of an evaluation is not used in it."""
LEVELS: Final[dict[str, tuple[Callable[[TrainingJob, Problem], float], int]]] = {
    "screen": (_screen, 1),
    "bounds": (_bounds, 1),
    "exact": (_exact, 1),
    "memory and time": (_memory_and_time, 1),
    "report": (_report, REPORTS),
}
"""What is evaluated: memory in bytes, infinite if it exceeds that of the GPU. And of how many layouts one is evaluated."""


def rate(model: str, level: str, count: int) -> float:
    """Evaluations a second of CPU time in this process."""
    evaluated, every = LEVELS[level]
    launch = problem(MODELS[model])
    jobs = list(layouts(launch.given))
    random.Random(0).shuffle(jobs)
    jobs = jobs[:count:every]
    start = time.process_time()
    sizes = [evaluated(job, launch) for job in jobs]
    elapsed = time.process_time() - start
    if min(sizes) <= 0:
        raise ValueError(f"{model}, {level}: a layout without memory")
    return len(jobs) / elapsed


def rate_in_process(model: str, level: str, count: int) -> float:
    """The same in a new process, with empty caches."""
    command = [sys.executable, "-m", "benchmarks.evaluations", model, level, str(count)]
    return float(subprocess.check_output(command, text=True))


def main() -> None:
    """Prints a line for each model and level."""
    if len(sys.argv) == 4:
        print(rate(sys.argv[1], sys.argv[2], int(sys.argv[3])))
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else LAYOUTS
    for model in MODELS:
        found = {level: rate_in_process(model, level, count) for level in LEVELS}
        for level, each in found.items():
            print(f"{model:12} {level:15} {each:8.1f} a second {each / found['report']:7.1f} × the report")


if __name__ == "__main__":
    main()
