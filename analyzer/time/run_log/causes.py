"""Likely causes of the difference between a log and the prediction.

Each follows from what the log says or from the time model: a factor is solved for with which the model would predict the measured
iteration. Such a cause is a possibility, not a finding, since several can act at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log as ln
from typing import Final

from analyzer.results import Report
from analyzer.time.estimate import TimeInputs, iteration_of, rates_of
from analyzer.time.run_log.factors import CAUSES, SLOWER_IF_LARGER, WIDTHS, explaining, scaled
from analyzer.time.run_log.launch import other_count, other_launch
from analyzer.time.run_log.memory_causes import memory_causes
from analyzer.time.run_log.record import Measured, RunLog
from analyzer.time.run_log.timers import predicted_timers
from analyzer.units import format_seconds

REPEATED: Final = 0.031
"""Median difference of two measurements of one setting (docs/time.md). Smaller differences are not explained."""
SPREAD: Final = 0.05
"""Difference of the 90th and the 10th percentile, relative to the median, from which on the spread is named."""
PASSES: Final = ("forward-compute", "backward-compute")
"""Timers of the passes."""
MOST: Final = 3
"""Factors that are named."""


@dataclass(frozen=True)
class Cause:
    """A likely cause."""

    kind: str
    """What it is about: launch, flops, warm_up, spread, outside, timers, memory, a factor, experts, agreement or unexplained."""
    text: str
    """One or two sentences."""
    factor: float | None = None
    """The factor of the model with which it would predict the measured iteration."""


def causes(log: RunLog, found: Measured, report: Report, inputs: TimeInputs | None) -> list[Cause]:
    """The likely causes, the most likely first."""
    listed = [Cause("launch", text) for text in other_launch(log, found, report)]
    if not listed and (text := other_count(found, report)):
        listed.append(Cause("flops", text))
    if found.with_warm_up:
        text = f"The log has only {len(found.used) + found.left_out} values, and those that are used contain first iterations."
        listed.append(Cause("warm_up", f"{text} They are slower: kernels are compiled and memory is allocated."))
    if spread := _spread(found, report):
        listed.append(Cause("spread", spread))
    time = report.time
    if time is not None and inputs is not None and not any(each.kind == "launch" for each in listed):
        difference = found.seconds / time.iteration_seconds - 1
        if abs(difference) <= REPEATED:
            text = f"The difference of {difference:+.1%} is within what two measurements of one launch differ by ({REPEATED:.1%})."
            listed.append(Cause("agreement", text))
        else:
            listed += _of_time(found, report, inputs)
    return [*listed, *(Cause("memory", text) for text in memory_causes(log, report))]


def _spread(found: Measured, report: Report) -> str:
    """A sentence about iterations that differ in time; empty if they hardly do."""
    if len(found.used) < 4 or found.slow - found.fast <= SPREAD * found.seconds:
        return ""
    text = (
        f"Iterations differ: one in ten takes {format_seconds(found.slow)} or more, and one in ten {format_seconds(found.fast)} or "
        "less. Data loading, other jobs on the network, garbage collection, changing clocks or, with MoE, changing routing would "
        "explain it."
    )
    predicted = None if report.time is None else report.time.iteration_seconds
    if predicted and abs(found.fast / predicted - 1) <= REPEATED < found.seconds / predicted - 1:
        text += " The fast iterations agree with the prediction, so what slows the others is not modelled."
    return text


def _of_time(found: Measured, report: Report, inputs: TimeInputs) -> Iterator[Cause]:
    """Causes of another time of an iteration."""
    time = iteration_of(report, inputs)
    timers = predicted_timers(report.job, time)
    yield from _of_timers(found, time.seconds, time.host_of_iteration, {name: each.most for name, each in timers.items()})
    listed = [] if inputs.flops_share is not None else _factors(found, report, inputs)
    yield from listed[:MOST]
    slower = found.seconds > time.seconds
    if slower and report.job.model.moe is not None:
        text = "Experts with more tokens than the mean would make an iteration longer: the prediction assumes equal numbers."
        yield Cause("experts", text)
    if not listed and inputs.flops_share is None:
        text = "No single factor of the model explains the difference: software, layout or machine differ in more than one."
        yield Cause("unexplained", text)


def _of_timers(found: Measured, seconds: float, outside: float, predicted: dict[str, float]) -> Iterator[Cause]:
    """Which of the timers has the difference. `outside`: predicted seconds outside of passes and optimizer step."""
    measured = {name: most for name, (_, most) in found.timers.items()}
    difference = found.seconds - seconds
    if {"forward-backward", "optimizer"} <= measured.keys():
        rest = found.seconds - measured["forward-backward"] - measured["optimizer"]
        if rest - outside > REPEATED * seconds:
            yield Cause(
                "outside",
                f"{format_seconds(rest)} of an iteration are neither forward and backward nor the optimizer step, and "
                f"{format_seconds(outside)} are predicted: logging, checks of gradients, or a wait for data or for a slower rank.",
            )
    if measured.get("batch-generator", 0.0) > REPEATED * seconds:
        text = f"The timer batch-generator has {format_seconds(measured['batch-generator'])}: data loading, which is not modelled."
        yield Cause("outside", text)
    ratios = [measured[name] / predicted[name] for name in PASSES if name in measured and predicted.get(name)]
    if len(ratios) == len(PASSES) and abs(ratios[0] / ratios[1] - 1) <= REPEATED < abs(ratios[0] - 1):
        text = (
            f"Forward and backward passes take {ratios[0]:.2f} and {ratios[1]:.2f} times as long as predicted: one factor for all "
        )
        yield Cause("timers", f"{text}kernels, such as the clock of the GPU, would explain it.")
        return
    most = max(
        (
            name
            for name in ("forward-backward", "forward-compute", "backward-compute", "optimizer")
            if {name} <= measured.keys() & predicted.keys()
        ),
        key=lambda name: (measured[name] - predicted[name]) * (1 if difference > 0 else -1),
        default="",
    )
    if most and abs(measured[most] - predicted[most]) > REPEATED * seconds:
        more = measured[most] - predicted[most]
        yield Cause(
            "timers",
            f"The timer {most} has the largest part of the difference: {format_seconds(abs(more))} "
            f"{'more' if more > 0 else 'less'} than predicted.",
        )


def _factors(found: Measured, report: Report, inputs: TimeInputs) -> list[Cause]:
    """The factors that alone would explain the time, the one that is the least unusual first."""
    listed: list[tuple[float, Cause]] = []
    for name in CAUSES:
        factor = explaining(report, inputs, name, found.seconds)
        if factor is not None:
            unusual = abs(ln(factor)) / WIDTHS[name]
            listed.append((unusual, Cause(name, _text(name, factor, report, inputs), factor)))
    return [cause for _, cause in sorted(listed, key=lambda each: each[0])]


def _text(name: str, factor: float, report: Report, inputs: TimeInputs) -> str:
    """What a factor means."""
    slower = (factor > 1) == (name in SLOWER_IF_LARGER)
    times = f"{factor:.2f} times"
    if name == "clock":
        rest = (
            "a lower clock under a power or temperature limit, or slower kernels" if slower else "a higher clock, or faster kernels"
        )
        return f"GEMMs and attention at {times} the assumed speed would explain it: {rest}."
    if name == "network":
        before, after = (each * inputs.speed.network_bytes / 1e9 for each in (1.0, factor))
        rest = "fewer network adapters, other traffic, or a slower transport of NCCL" if slower else "a faster network"
        what = f"A network of {after:.3g} GB/s for each GPU instead of {before:.3g}"
        return f"{what} would explain it (--info-network {after:.3g}): {rest}."
    if name == "nvlink":
        rest = "no NVLink between all GPUs, or other settings of NCCL" if slower else "other algorithms of NCCL"
        return f"Messages within a node at {times} the assumed bandwidth would explain it: {rest}."
    if name == "memory":
        rest = "unfused kernels" if slower else "kernels that are fused further"
        return f"Memory-bound kernels at {times} the assumed bandwidth would explain it: {rest}."
    share = _host_share(factor, report, inputs)
    rest = (
        "a slower processor, processes on the wrong cores, or debugging options" if slower else "a faster processor or CUDA graphs"
    )
    graphs = " The launch captures no CUDA graphs." if report.job.graphs is None and slower else ""
    return (
        f"A host that takes {times} as long to issue an operation would explain it: {rest}. The GPU would then wait for the host "
        f"{share:.0%} of an iteration.{graphs}"
    )


def _host_share(factor: float, report: Report, inputs: TimeInputs) -> float:
    """Share of an iteration in which the GPU waits for a host that takes `factor` times as long."""
    time = iteration_of(report, replace(inputs, rates=scaled(rates_of(inputs), {"host_call": factor})))
    return time.parts["host"] / time.seconds
