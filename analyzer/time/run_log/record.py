"""What a log of a training run says, and the iterations that represent it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Final, NamedTuple

WARM_UP: Final = 10
"""First iterations of a run, in which kernels are compiled, memory is allocated and CUDA graphs are captured."""


class Iteration(NamedTuple):
    """A line about an iteration. With `--log-interval N` its seconds are the mean of the last N iterations."""

    number: int
    seconds: float
    tflops: float | None = None
    """Model TFLOP/s for each GPU."""
    batch: int | None = None
    """Global batch size."""
    restarted: bool = False
    """Whether the number is not above the one before: the run was started again."""


class Memory(NamedTuple):
    """The last memory report of a rank, in bytes."""

    iteration: int
    """Iterations after which it was made."""
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


class Timer(NamedTuple):
    """A value of a timer, in seconds for each iteration."""

    after: int
    """Lines about iterations that stand before it."""
    least: float
    """On the fastest rank."""
    most: float
    """On the slowest rank."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What the log of a run says."""

    path: str
    iterations: Sequence[Iteration]
    """In the order of the file; at least one."""
    memory: Mapping[int, Memory] = field(default_factory=dict)
    """By global rank."""
    parameters: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Parameters on a tensor and pipeline rank."""
    total_parameters: float | None = None
    """Of the model, as Megatron's `theoretical_memory_usage.py` estimates them."""
    theoretical_bytes: int | None = None
    """Memory of the highest-memory rank, as the same file estimates it."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the launch that the log states, by the names of Megatron's arguments."""
    timers: Mapping[str, Sequence[Timer]] = field(default_factory=dict)
    retries: int = 0
    """How often PyTorch freed cached memory because an allocation failed (`num_alloc_retries`), on the rank with the most."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The iterations of a log after the warm-up."""

    used: tuple[Iteration, ...]
    left_out: int
    """Lines before them, or with another global batch size."""
    seconds: float
    """Median of the seconds of an iteration."""
    fast: float
    """10th percentile of the seconds."""
    slow: float
    """90th percentile of the seconds."""
    tflops: float | None
    """Median of the model TFLOP/s for each GPU; None if the log does not have them."""
    batch: int | None
    """Global batch size."""
    timers: Mapping[str, tuple[float, float]]
    """Median seconds of each timer for an iteration, on the fastest and on the slowest rank."""

    @property
    def first(self) -> int:
        """The number of the first iteration that is used."""
        return self.used[0].number

    @property
    def last(self) -> int:
        """The number of the last iteration that is used."""
        return self.used[-1].number

    @property
    def values(self) -> int:
        """How many values are used."""
        return len(self.used)

    @property
    def with_warm_up(self) -> bool:
        """Whether the log is so short that first iterations are used."""
        return self.last - self.first < WARM_UP and self.first <= WARM_UP


def measured(log: RunLog) -> Measured:
    """The iterations of a log that represent the run.

    Those within `WARM_UP` iterations of the first line of a run are left out, but at most half of its lines. So are those with
    another global batch size than the last line (batch size ramp-up).
    """
    batch = log.iterations[-1].batch
    chosen: list[int] = []
    for start, end in _runs(log.iterations):
        lines = range(start, end)
        warm = log.iterations[start].number + WARM_UP
        early = sum(log.iterations[index].number < warm for index in lines)
        chosen += [index for index in lines[min(early, len(lines) // 2) :] if log.iterations[index].batch == batch]
    used = tuple(log.iterations[index] for index in chosen)
    seconds = [each.seconds for each in used]
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds
    rates = [each.tflops for each in used if each.tflops is not None]
    places = {index + 1 for index in chosen}
    timers = {}
    for name, values in log.timers.items():
        late = [each for each in values if each.after in places] or list(values)
        timers[name] = (median(each.least for each in late), median(each.most for each in late))
    return Measured(
        used=used,
        left_out=len(log.iterations) - len(used),
        seconds=median(seconds),
        fast=tenths[0],
        slow=tenths[-1],
        tflops=median(rates) if rates else None,
        batch=batch,
        timers=timers,
    )


def _runs(iterations: Sequence[Iteration]) -> list[tuple[int, int]]:
    """Start and end of the lines of each run: a log may continue after a restart."""
    starts = [0, *(index for index, each in enumerate(iterations) if each.restarted and index)]
    return list(zip(starts, [*starts[1:], len(iterations)], strict=True))
