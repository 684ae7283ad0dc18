"""Two pieces of work measured in alternation, so that changes of the machine's speed affect both equally.

Times are CPU time of the process, all threads together, which other programs change less than they change elapsed time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Work against a baseline: medians over the runs, and the bound of their ratio."""

    name: str
    seconds: float
    baseline_seconds: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.baseline_seconds

    @property
    def missed(self) -> bool:
        return self.ratio > self.bound

    def __str__(self) -> str:
        times = f"{self.seconds * 1e3:9.2f} ms {self.baseline_seconds * 1e3:9.2f} ms"
        return f"{self.name:52} {times} {self.ratio:7.2f}x  bound {self.bound:g}x{'  MISSED' if self.missed else ''}"


def paired(name: str, work: Callable[[], object], baseline: Callable[[], object], *, bound: float, runs: int = 9) -> Paired:
    """Runs both once to warm up, then `runs` times in alternation."""
    work(), baseline()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for function, taken in zip((work, baseline), times, strict=True):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
    return Paired(name, statistics.median(times[0]), statistics.median(times[1]), bound)


def report(results: list[Paired]) -> int:
    """Prints a line for each; exit status 1 if a bound is missed."""
    print(f"{'':52} {'time':>12} {'baseline':>12} {'ratio':>8}")
    for result in results:
        print(result)
    return 1 if any(result.missed for result in results) else 0
