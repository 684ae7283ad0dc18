"""The log of a run beside the prediction (`--info-log`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from analyzer.report.console.elements import KEY, fields, heading, paragraph, points, table
from analyzer.report.console.names import plural
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from analyzer.time.run_log.compare import Figure, LogComparison

LABELS: Final = {
    "iteration_seconds": "iteration",
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "model_tflops_per_gpu": "model TFLOP/s/GPU",
    "parameters": "parameters (estimated in the log)",
    "rank.parameters": "parameters",
    "rank.memory.allocated_bytes": "allocated between iterations",
    "rank.memory.peak_allocated_first_iteration_bytes": "peak of the first iteration",
    "rank.memory.peak_allocated_bytes": "peak allocated",
    "rank.memory.peak_reserved_bytes": "peak reserved",
    "timers.forward-backward": "forward and backward",
    "timers.forward-compute": "forward passes",
    "timers.backward-compute": "backward passes",
    "timers.optimizer": "optimizer step",
    "timers.all-grads-sync": "reduction of gradients",
    "timers.grads-reduce-scatter": "reduction of gradients",
    "timers.grads-all-reduce": "reduction of gradients",
    "timers.params-all-gather": "gather of parameters",
    "timers.batch-generator": "data of the batches",
}


def log(result: LogComparison) -> list[RenderableType]:
    """The iterations that are used, a table of measured and predicted figures, and the likely causes of differences."""
    found = result.measured
    first, last = found.used[0].number, found.used[-1].number
    used = f"{format_count(first)} to {format_count(last)}: {plural(len(found.used), 'value')}, of which the median is used"
    if found.left_out:
        used += f"; {plural(found.left_out, 'value')} of the warm-up or of other batch sizes left out"
    rows = [("iterations", used)]
    if len(found.used) > 1:
        rows.append(("spread", f"8 of 10 values are from {format_seconds(found.fast)} to {format_seconds(found.slow)}"))
    if result.log.theoretical_bytes is not None:
        rows.append(("Megatron", f"estimates {format_bytes(result.log.theoretical_bytes)} for the highest-memory rank in the log"))
    lines = [*heading(f"Measured in {result.log.path}"), fields(rows), ""]
    lines.append(table(("", "measured", "predicted", "difference"), [_row(each) for each in result.figures], align="lrrr"))
    if result.causes:
        lines += ["", paragraph("What would explain the differences, the most likely first:", style=KEY)]
        lines.append(points([cause.text for cause in result.causes]))
    return lines


def print_log(result: LogComparison, *, stream: TextIO) -> None:
    """Writes the section to `stream`, as the console report is written."""
    from analyzer.report.console.report import write

    write(lambda _width: log(result), stream=stream)


def _row(figure: Figure) -> tuple[str, ...]:
    label = LABELS.get(figure.field) or figure.field
    predicted = "" if figure.predicted is None else _text(figure, figure.predicted)
    percent = "" if figure.percent is None else f"{figure.percent:+.1f}%"
    return (f"{label}, {figure.where}" if figure.where else label, _text(figure, figure.measured), predicted, percent)


def _text(figure: Figure, value: float) -> str:
    if figure.field.endswith("_bytes"):
        return format_bytes(round(value))
    if figure.field == "iteration_seconds" or figure.field.startswith("timers."):
        return format_seconds(value)
    if figure.field == "model_tflops_per_gpu":
        return f"{value:,.1f}"
    return format_count(round(value))
