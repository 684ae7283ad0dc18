"""Times a function on a GPU or, for tests, on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

Run = Callable[[], Any]

SAMPLE: Final = 0.03
"""Seconds of a sample, if one run is shorter."""
SAMPLES: Final = 7
MOST_LAUNCHES: Final = 600
"""Kernels of a sample. The queue of a GPU holds about 1,000: a longer one would stop the host."""
CLOCK_RATE: Final = 2e9
"""Cycles per second, about, for the pause that lets the host run ahead."""
LONGEST_PAUSE: Final = 0.5


class Clock(Protocol):
    """Times runs that all do the same, on different data."""

    def seconds(self, runs: Sequence[Run], *, launches: int = 1) -> float:
        """Median seconds of one run. `launches`: kernels of a run."""


class CudaClock:
    """Times kernels with CUDA events.

    The GPU first waits while the host issues all kernels of a sample, so that the time is that of the kernels and not of the host.
    """

    def seconds(self, runs: Sequence[Run], *, launches: int = 1) -> float:
        for run in (*runs, *runs):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        runs[0]()
        issue = time.perf_counter() - start
        torch.cuda.synchronize()
        one = time.perf_counter() - start
        count = max(1, min(int(SAMPLE / one), MOST_LAUNCHES // launches))
        return statistics.median(self._sample(runs, count, issue * count) for _ in range(SAMPLES))

    def _sample(self, runs: Sequence[Run], count: int, issue: float) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pause = min(1.5 * issue + 50e-6, LONGEST_PAUSE)
        torch.cuda._sleep(int(pause * CLOCK_RATE))
        begin.record()
        for place in range(count):
            runs[place % len(runs)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / count


class HostClock:
    """Times functions on the CPU, with what they wait for."""

    def __init__(self, *, samples: int = SAMPLES, sample: float = SAMPLE, synchronize: Run = lambda: None) -> None:
        self._samples, self._sample, self._synchronize = samples, sample, synchronize

    def seconds(self, runs: Sequence[Run], *, launches: int = 1) -> float:  # noqa: ARG002 - as the protocol
        for run in runs:
            run()
        self._synchronize()
        start = time.perf_counter()
        runs[0]()
        self._synchronize()
        count = max(1, int(self._sample / max(1e-7, time.perf_counter() - start)))
        found = []
        for _ in range(self._samples):
            start = time.perf_counter()
            for place in range(count):
                runs[place % len(runs)]()
            self._synchronize()
            found.append((time.perf_counter() - start) / count)
        return statistics.median(found)
