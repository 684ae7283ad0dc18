"""The time of an iteration and of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.report.console.elements import fields, heading, paragraph, table
from analyzer.report.console.names import plural
from analyzer.results import Report, TimeEstimate, TrainingTime
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

PARTS: Final = {
    "gemm": "GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "exposed_tp": "exposed TP communication",
    "exposed_cp": "exposed CP communication",
    "exposed_ep": "exposed EP communication",
    "exposed_pp": "exposed PP messages",
    "exposed_dp": "exposed DP communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
    "host": "GPU waits for the host",
}
"""Names of the parts of an iteration."""
EXPOSED: Final = "Exposed communication is communication that the GPU waits for."
SMALLEST: Final = 0.001
"""Parts below this share are not printed."""


def time(report: Report, *, full: bool) -> list[RenderableType]:
    """The time section; empty if the speeds of the GPU are not known. `full`: with the table of the parts and what they mean."""
    found = report.time
    if found is None:
        return []
    throughput = f"{found.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, {found.model_tflops_per_gpu:,.0f} TFLOP/s/GPU"
    rows = [
        ("iteration", _iteration(found)),
        ("throughput", throughput if full else f"{throughput}, MFU {found.model_flops_utilization:.1%}"),
        *([("MFU, HFU", _utilization(found))] if full else [("parts", _shares(found))]),
        *_training(found.training),
        *([("efficiencies", found.calibration)] if full or "assumed" in found.calibration or "fitted" in found.calibration else []),
    ]
    section = [*heading("Time (estimate)"), fields(rows)]
    return (
        [*section, "", parts(found), "", paragraph(EXPOSED), paragraph(found.bottleneck), *_not_counted(found)] if full else section
    )


def _iteration(found: TimeEstimate) -> str:
    if found.range_seconds is None:
        return format_seconds(found.iteration_seconds)
    lower, upper = map(format_seconds, found.range_seconds)
    return f"{format_seconds(found.iteration_seconds)} (likely {lower} to {upper})"


def _shares(found: TimeEstimate) -> str:
    """The parts in one line, largest first."""
    shares = sorted(((value / found.iteration_seconds, PARTS[name]) for name, value in found.parts_seconds.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.01)


def _utilization(found: TimeEstimate) -> str:
    used = f"{found.model_flops_utilization:.1%}, {found.hardware_flops_utilization:.1%}"
    return f"{used} of the 16-bit peak, {found.peak_flops / 1e12:,.0f} TFLOP/s"


def parts(found: TimeEstimate) -> RenderableType:
    """The parts of an iteration on the pipeline rank that finishes last."""
    total = found.iteration_seconds
    rows = [
        (PARTS[name], format_seconds(value), f"{value / total:.1%}")
        for name, value in found.parts_seconds.items()
        if value >= SMALLEST * total
    ]
    rows.append(("iteration", format_seconds(total), "100.0%"))
    return table((f"pipeline rank {found.pipeline_rank}", "seconds", "share"), rows, align="lrr", strong=(len(rows) - 1,))


def _training(training: TrainingTime | None) -> list[tuple[str, str]]:
    if training is None:
        return []
    length = f"{training.days:,.1f} days" if training.days >= 1 else f"{24 * training.days:,.2f} hours"
    text = f"{length}, {format_hours(training.gpu_hours)} GPU-hours"
    tokens = f"{training.tokens / 1e9:,.1f} billion" if training.tokens >= 1e9 else format_count(training.tokens)
    text += f": {plural(training.iterations, 'iteration')}, {tokens} tokens"
    rows = [("training", text)]
    between = [
        f"{days:,.2f} days for {what}"
        for days, what in ((training.evaluation_days, "evaluation"), (training.checkpoint_days, "saving checkpoints"))
        if days >= 0.005
    ]
    if between:
        rows.append(("of which", ", ".join(between)))
    if training.checkpoint_bytes:
        rows.append(("checkpoint size", format_bytes(training.checkpoint_bytes)))
    if training.cost is not None:
        cost = f"{training.cost:,.{0 if training.cost >= 100 else 2}f}"
        rows.append(("cost", f"{cost} ({format_hours(training.gpu_hours)} GPU-hours at {training.cost / training.gpu_hours:,.2f})"))
    return rows


def format_hours(hours: float) -> str:
    """Hours, with decimals if there are few."""
    return f"{hours:,.{0 if hours >= 100 else 2}f}"


def _not_counted(found: TimeEstimate) -> list[RenderableType]:
    return [paragraph(f"Not counted: {'; '.join(found.not_counted)}.")] if found.not_counted else []
