"""Evaluations a second at three levels of effort: the screen, the exact memory of the highest-memory rank, and the full report.

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
from typing import Final

from analyzer.memory.ranks import highest_rank
from analyzer.memory.screen import screen
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from benchmarks.layouts import DEEPSEEK_V3, LLAMA_3_70B, job_of, layouts

MODELS: Final = {"Llama-3-70B": LLAMA_3_70B, "DeepSeek-V3": DEEPSEEK_V3}
LAYOUTS: Final = 3000
REPORTS: Final = 20
"""A full report is slow: one in so many layouts is evaluated."""


def _device_bytes_of_screen(job: TrainingJob) -> int:
    return screen(job).device_bytes


def _device_bytes_of_rank(job: TrainingJob) -> int:
    return highest_rank(job).memory.device_bytes


def _device_bytes_of_report(job: TrainingJob) -> int:
    return max(rank.memory.device_bytes for rank in predict(job).ranks)


LEVELS: Final[dict[str, tuple[Callable[[TrainingJob], int], int]]] = {
    "screen": (_device_bytes_of_screen, 1),
    "exact": (_device_bytes_of_rank, 1),
    "report": (_device_bytes_of_report, REPORTS),
}
"""What is evaluated, and of how many layouts one."""


def rate(model: str, level: str, count: int) -> float:
    """Evaluations a second of CPU time in this process."""
    evaluate, every = LEVELS[level]
    jobs = list(layouts(job_of(MODELS[model])))
    random.Random(0).shuffle(jobs)
    jobs = jobs[:count:every]
    start = time.process_time()
    sizes = [evaluate(job) for job in jobs]
    elapsed = time.process_time() - start
    if min(sizes) <= 0:
        raise ValueError(f"{model}, {level}: a layout without memory")
    return len(jobs) / elapsed


def main() -> None:
    """Prints a line for each model and level."""
    if len(sys.argv) == 4:
        print(rate(sys.argv[1], sys.argv[2], int(sys.argv[3])))
        return
    count = sys.argv[1] if len(sys.argv) > 1 else str(LAYOUTS)
    for model in MODELS:
        command = [sys.executable, "-m", "benchmarks.evaluations", model]
        found = {level: float(subprocess.check_output([*command, level, count], text=True)) for level in LEVELS}
        for level, each in found.items():
            print(f"{model:12} {level:7} {each:8.1f} a second {each / found['report']:7.1f} × the report")


if __name__ == "__main__":
    main()
