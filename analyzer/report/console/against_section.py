"""What changed since an older report (`--info-against`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from analyzer.report.against import PARTS, Against, Change, Value
from analyzer.report.console import names
from analyzer.report.console.elements import BAD, GOOD, KEY, heading, paragraph, table
from analyzer.report.console.time_section import PARTS as TIME_PARTS
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

TIME_PART: Final = "time.parts_seconds."
SOURCES: Final = {"engine": "engines", "megatron": "releases of Megatron-LM", "verdict.gpu": "GPUs"}
TITLES: Final = {
    "verdict": "verdict",
    "memory": "memory of the highest-memory rank",
    "time": "time of one iteration",
    "communication": "communication of one iteration",
    "model": "model",
    "layout": "layout",
    "batch": "batch",
}
LABELS: Final = {
    "verdict.tightest_rank": "highest-memory rank",
    "verdict.capacity_bytes": "GPU capacity",
    "rank.memory.optimizer_bytes": "optimizer states",
    "rank.memory.runtime_bytes": "workspaces and caches",
    "rank.memory.activations_bytes": "saved activations",
    "rank.memory.transient_bytes": "temporary tensors at the peak",
    "rank.memory.peak_allocated_bytes": "peak allocated",
    "rank.memory.peak_reserved_bytes": "peak reserved",
    "rank.memory.device_bytes": "on the device",
    "time.iteration_seconds": "iteration",
    "time.tokens_per_second_per_gpu": "tokens/s/GPU",
    "time.training.days": "days of the training",
    "time.training.gpu_hours": "GPU-hours",
    "rank.parameters": "parameters of the highest-memory rank",
    "model.parameters_unpadded": "parameters without vocabulary padding",
    "model.parameters_active": "parameters active per token",
    "model.parameters_routed_experts": "parameters of routed experts",
    "model.padded_vocab_size": "padded vocabulary size",
    "world.size": "GPUs",
    "world.gpus_per_node": "GPUs per node",
    "parallel.virtual_pipeline": "virtual pipeline stages",
    "parallel.order": "order of ranks",
    "parallel.sequence_parallel": "sequence parallelism",
    "batch.micro": "micro-batch size",
    "batch.global": "global batch size",
}
"""Names of fields that are not those in the JSON report without `_bytes`."""
CALLS: Final = {
    "bytes_per_iteration": "bytes of one rank",
    "calls_per_iteration": "calls of one rank",
    "cluster_bytes_per_iteration": "bytes of all ranks",
    "cluster_calls_per_iteration": "calls of all ranks",
}


def against(result: Against) -> list[RenderableType]:
    """The difference in device memory and the part that changed most, then a table of all changes."""
    lines = heading(f"Changes since {result.file}")
    sources = result.sections.get("source", ())
    lines += [paragraph(f"The {SOURCES[each.field]} differ: {_before_and_now(each)}.", style=KEY) for each in sources]
    shown = {name: result.sections[name] for name in TITLES if name in result.sections}
    if not shown:
        return [*lines, paragraph("Nothing else changed." if sources else "Nothing changed.")]
    rows: list[tuple[str, ...]] = []
    strong = []
    for name, changes in shown.items():
        strong.append(len(rows))
        rows += [(TITLES[name], "", "", "", ""), *map(_row, changes)]
    if state := next((each for each in shown.get("verdict", ()) if each.field == "verdict.state"), None):
        style = GOOD if state.new == "fits" else BAD if state.new == "does not fit" else KEY
        lines.append(paragraph(f"The verdict differs: {_before_and_now(state)}.", style=style))
    if memory := shown.get("memory"):
        lines.append(paragraph(_summary({change.field.rpartition(".")[2]: change for change in memory})))
    if time := shown.get("time"):
        lines.append(paragraph(_summary_of_time(time)))
    return [*lines, table(("", "before", "now", "difference", ""), rows, align="lrrrr", strong=strong)]


def print_against(result: Against, *, stream: TextIO) -> None:
    """Writes the section to `stream`, as the console report is written."""
    from analyzer.report.console.report import write

    write(lambda _width: against(result), stream=stream)


def _summary(memory: dict[str, Change]) -> str:
    """The change of the device memory, and that of the part that changed most. `memory` has the changes by field, in order."""
    device = memory.get("device_bytes")
    text = "Device memory of the highest-memory rank: "
    text += f"{_difference(device)} ({_percent(device)})." if device else "no difference."
    part = next((change for name, change in memory.items() if name in PARTS), None)
    return f"{text} Changed most: {_label(part)}, {_difference(part)}." if part else text


def _summary_of_time(changes: Sequence[Change]) -> str:
    """The change of the iteration, and that of the part that changed most. `changes` are in order."""
    iteration = next((change for change in changes if change.field == "time.iteration_seconds"), None)
    text = f"Iteration: {_difference(iteration)} ({_percent(iteration)})." if iteration else "Iteration: no difference."
    part = changes[0] if changes[0].field.startswith(TIME_PART) else None
    return f"{text} Changed most: {_label(part)}, {_difference(part)}." if part else text


def _row(change: Change) -> tuple[str, ...]:
    return (
        f"  {_label(change)}",
        _text(change, change.old),
        _text(change, change.new),
        _difference(change),
        _percent(change),
    )


def _label(change: Change) -> str:
    if change.field.startswith("communication_totals."):
        group, _, sum_of = change.field.removeprefix("communication_totals.").rpartition(".")
        return f"{names.group(group)}: {CALLS[sum_of]}"
    if change.field.startswith(TIME_PART):
        return TIME_PARTS.get(part := change.field.removeprefix(TIME_PART), part.replace("_", " "))
    name = change.field.rpartition(".")[2].removesuffix("_bytes").replace("_", " ")
    return LABELS.get(change.field) or (f"{name} parallelism" if change.field.startswith("parallel.") else name)


def _before_and_now(change: Change) -> str:
    return f"{_text(change, change.old)} before, {_text(change, change.new)} now"


def _text(change: Change, value: Value) -> str:
    if value is None:
        return "none" if change.field.startswith("parallel.") else "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        sign = "-" if value < 0 else ""
        return sign + (format_seconds(abs(value)) if "seconds" in change.field else _amount(abs(value)))
    return format_bytes(value) if "bytes" in change.field else format_count(value)


def _amount(value: float) -> str:
    """Days, GPU-hours, costs and throughputs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def _difference(change: Change) -> str:
    """The difference with its sign; empty for text."""
    if change.difference is None:
        return ""
    text = _text(change, change.difference)
    return f"+{text}" if change.difference > 0 else text


def _percent(change: Change) -> str:
    if change.percent is None or change.field.startswith(("parallel.", "world.", "batch.")):
        return ""
    return f"{change.percent:+,.1f}%" if abs(change.percent) >= 0.05 else "<0.1%"
