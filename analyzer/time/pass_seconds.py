"""Seconds of the forward or the backward of a microbatch through a chunk, by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernel_seconds import kernel_seconds
from analyzer.time.links import span_of
from analyzer.time.message_seconds import message_seconds
from analyzer.time.pass_work import Exposure, PassWork
from analyzer.time.work.kernels import Attention, Gemm


class PassSeconds(NamedTuple):
    """Seconds of a pass on its rank. The parts add up to its time."""

    gemm: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    host: float = 0.0
    """Seconds for which the GPU waits for the host."""

    @property
    def total(self) -> float:
        """Seconds from the start to the end."""
        return sum(self)

    def plus(self, other: PassSeconds, times: float = 1) -> PassSeconds:
        """The sum with `times` of another pass."""
        return PassSeconds(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


def exposed_share(exposure: Exposure, rates: Efficiencies) -> float:
    """Share of the seconds of a message that no kernel hides."""
    if exposure == "full":
        return 1.0
    if exposure == "tp_overlap":
        return rates.tp_overlap_exposed
    if exposure == "tp_backward":
        return rates.tp_backward_exposed
    return rates.cp_exposed if exposure == "cp" else rates.ep_overlap_exposed


class Run(NamedTuple):
    """Seconds of a pass on the device and on the host. Sums of runs are runs."""

    device: PassSeconds
    """Kernels and messages, without waits for the host."""
    issue: float
    """Seconds that the host needs to issue the operations. It does so while the device runs earlier ones."""
    synchronization: float
    """Seconds for which the device idles because the host waits for it."""

    @property
    def seconds(self) -> PassSeconds:
        """The pass with the time for which the device waits for the host."""
        waits = max(0.0, self.issue - self.device.total) + self.synchronization
        return self.device._replace(host=waits)


def sum_of_runs(runs: Sequence[tuple[Run, int]]) -> Run:
    """Runs after each other, each with its number."""
    device = [0.0] * len(PassSeconds())
    issue = synchronization = 0.0
    for run, times in runs:
        for place, seconds in enumerate(run.device):
            device[place] += times * seconds
        issue += times * run.issue
        synchronization += times * run.synchronization
    return Run(PassSeconds(*device), issue, synchronization)


def pass_run(job: TrainingJob, work: PassWork, speed: SpeedSpec, rates: Efficiencies) -> Run:
    """The run of a pass. Hidden messages slow the kernels that run at the same time; this counts to the part of the message."""
    kernels = [0.0, 0.0, 0.0]
    for kernel, count in work.kernels:
        place = 0 if isinstance(kernel, Gemm) else 1 if isinstance(kernel, Attention) else 2
        kernels[place] += count * kernel_seconds(kernel, speed, rates)
    shown = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for message, count in work.messages:
        span = span_of(job, message.group, speed)
        one = message_seconds(message.kind, message.payload, span, speed, rates, exchange=message.exchange, choices=message.choices)
        seconds = count * one.total
        exposed = exposed_share(message.exposure, rates)
        shown[message.part] += seconds * (exposed + (1 - exposed) * rates.slowdown)
    device = PassSeconds(kernels[0], kernels[1], kernels[2], shown["tp"], shown["cp"], shown["ep"])
    issue = rates.host_call * (work.calls + rates.graph_call * work.graph_calls)
    return Run(device, issue, rates.host_sync * work.synchronizations)


def pass_seconds(job: TrainingJob, work: PassWork, speed: SpeedSpec, rates: Efficiencies) -> PassSeconds:
    """Seconds of a pass."""
    return pass_run(job, work, speed, rates).seconds
