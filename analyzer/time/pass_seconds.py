"""Seconds of the forward or the backward of a microbatch through a chunk, by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.links import span_of
from analyzer.time.message_seconds import message_seconds
from analyzer.time.pass_work import Message, PassWork
from analyzer.time.work.kernels import Attention, Gemm, HostLoop


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


def shown_seconds(message: Message, seconds: float, tensor: int, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds by which a message delays its pass, of the `seconds` of its transfer.

    A message is hidden as far as the kernels beside it last, and slows them. A message that is exchanged in parts with its GEMM
    shows at least one part, of `tensor` ranks, and one that competes with a GEMM for multiprocessors a share. What another
    microbatch hides is not known here: it counts as 0.
    """
    if message.exposure == "full":
        return seconds
    if message.exposure == "microbatch":
        return 0.0
    beside = message.behind_share * sum(kernel_seconds(kernel, speed, rates) for kernel in message.behind)
    least = _least_share(message, tensor, rates) * seconds
    shown = max(seconds - rates.window * beside, least)
    return shown + (seconds - shown) * rates.slowdown


def _least_share(message: Message, tensor: int, rates: Efficiencies) -> float:
    """Share of a message that shows however long the kernels beside it last."""
    if message.exposure == "userbuffers":
        return 1 / tensor
    return rates.tp_backward_exposed if message.part == "tp" else 0.0


def message_time(job: TrainingJob, message: Message, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of the transfer of one call."""
    span = span_of(job, message.group, speed)
    return message_seconds(
        message.kind, message.payload, span, speed, rates, exchange=message.exchange, choices=message.choices
    ).total


class Run(NamedTuple):
    """Seconds of a pass on the device and on the host. Sums of runs are runs."""

    device: PassSeconds
    """Kernels and messages, without waits for the host, and without `exchange`."""
    issue: float
    """Seconds that the host needs to issue the operations. It does so while the device runs earlier ones."""
    synchronization: float
    """Seconds for which the device idles because the host waits for it."""
    exchange: float = 0.0
    """Seconds of the messages of experts that run beside the kernels of another microbatch."""

    @property
    def seconds(self) -> PassSeconds:
        """The pass with the time for which the device waits for the host."""
        waits = max(0.0, self.issue - self.device.total) + self.synchronization
        return self.device._replace(host=waits)


def pair_seconds(forward: Run, backward: Run, rates: Efficiencies) -> tuple[PassSeconds, PassSeconds]:
    """Seconds of the forward and the backward of a chunk.

    With `--overlap-moe-expert-parallel-comm` the forward of one microbatch runs beside the backward of another. Their exchanges of
    tokens are hidden as far as the kernels of both last, except for those at the ends of the chunk.
    """
    exchange = forward.exchange + backward.exchange
    if not exchange:
        return forward.seconds, backward.seconds
    beside = forward.device.total + backward.device.total
    exposed = max(rates.ep_overlap_exposed, 1 - rates.window * beside / exchange)
    share = exposed + (1 - exposed) * rates.slowdown
    first, second = (
        run._replace(device=run.device._replace(ep=run.device.ep + share * run.exchange)).seconds for run in (forward, backward)
    )
    return first, second


def sum_of_runs(runs: Sequence[tuple[Run, int]]) -> Run:
    """Runs after each other, each with its number."""
    device = [0.0] * len(PassSeconds())
    issue = synchronization = exchange = 0.0
    for run, times in runs:
        for place, seconds in enumerate(run.device):
            device[place] += times * seconds
        issue += times * run.issue
        synchronization += times * run.synchronization
        exchange += times * run.exchange
    return Run(PassSeconds(*device), issue, synchronization, exchange)


def pass_run(job: TrainingJob, work: PassWork, speed: SpeedSpec, rates: Efficiencies) -> Run:
    """The run of a pass. Hidden messages slow the kernels that run at the same time; this counts to the part of the message."""
    kernels = [0.0, 0.0, 0.0]
    issue = rates.host_call * (work.calls + rates.graph_call * work.graph_calls)
    waits = rates.host_sync * work.synchronizations
    for kernel, count in work.kernels:
        if isinstance(kernel, HostLoop):
            seconds = count * kernel_seconds(kernel, speed, rates)
            issue, waits = (issue, waits + seconds) if kernel.reads else (issue + seconds, waits)
            continue
        place = 0 if isinstance(kernel, Gemm) else 1 if isinstance(kernel, Attention) else 2
        kernels[place] += count * kernel_seconds(kernel, speed, rates)
    shown = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    exchange = 0.0
    for message, count in work.messages:
        seconds = message_time(job, message, speed, rates)
        if message.exposure == "microbatch":
            exchange += count * seconds
        else:
            shown[message.part] += count * shown_seconds(message, seconds, job.parallel.tensor, speed, rates)
    device = PassSeconds(kernels[0], kernels[1], kernels[2], shown["tp"], shown["cp"], shown["ep"])
    return Run(device, issue, waits, exchange)
