"""Data-parallel communication of an iteration: gradients reduced and parameters gathered, partly hidden behind passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.links import span_of
from analyzer.time.message_seconds import message_seconds

_SMALL: Final = 100_000
"""Bytes. Smaller messages are scalars around the optimizer step."""


class Traffic(NamedTuple):
    """Messages of one kind in an iteration."""

    seconds: float = 0.0
    calls: int = 0

    @property
    def one(self) -> float:
        """Seconds of one call on average."""
        return self.seconds / self.calls if self.calls else 0.0


class StageTraffic(NamedTuple):
    """Data-parallel traffic of a rank of a pipeline stage in an iteration."""

    gradients: Traffic
    parameters: Traffic
    every_microbatch: Traffic
    """Of fully sharded parameters: gathers in each pass, and reductions of each microbatch."""
    scalars: float
    """Seconds of small messages."""


def stage_traffic(job: TrainingJob, rows: Iterable[CommunicationRow], speed: SpeedSpec, rates: Efficiencies) -> StageTraffic:
    """The traffic of one pipeline stage. `rows` are those of its communication table."""
    sums = {"gradient": [0.0, 0], "parameter": [0.0, 0], "each": [0.0, 0]}
    scalars = 0.0
    for row in rows:
        sharded = job.fsdp is not None and row.module.startswith("data_parallel")
        if row.phase not in ("gradient", "parameter") and not sharded:
            continue
        cost = message_seconds(row.kind, row.message_bytes, span_of(job, row.group, speed), speed, rates).total
        if row.message_bytes < _SMALL:
            scalars += cost * row.calls_per_iteration
            continue
        entry = sums["each" if row.calls_per_microbatch else row.phase]
        entry[0] += cost * row.calls_per_iteration
        entry[1] += row.calls_per_iteration
    found = {name: Traffic(seconds, int(calls)) for name, (seconds, calls) in sums.items()}
    return StageTraffic(found["gradient"], found["parameter"], found["each"], scalars)


def exposed(traffic: Traffic, window: float, rates: Efficiencies, *, overlapped: bool) -> float:
    """Seconds that `traffic` adds to an iteration. `window`: seconds of the passes that can hide it.

    The last bucket is not hidden: its gradients are complete, or its parameters needed, when no pass is left to hide it. Hidden
    messages slow the passes.
    """
    if not overlapped:
        return traffic.seconds
    shown = max(traffic.seconds - rates.window * window, traffic.one)
    return shown + rates.slowdown * (traffic.seconds - shown)
