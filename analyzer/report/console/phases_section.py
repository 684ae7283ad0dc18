"""The phases of an iteration of reinforcement learning: memory of the GPU and of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.report.console.elements import heading, paragraph, table
from analyzer.results import PhaseMemory, Report
from analyzer.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADER = ("phase", "rank", "states", "activations", "engine", "on the device", "at most", "on the host")


def phases(report: Report) -> list[RenderableType]:
    """A row for each phase with the rank that needs the most in it; nothing for launches without phases."""
    if not report.phases:
        return []
    peak = max(report.phases, key=lambda each: each.device_bytes)
    nodes = report.job.parallel.gpus_per_node
    host = max(each.host_bytes for each in report.phases)
    texts = [f"The peak is that of the {peak.name}, {format_bytes(peak.device_bytes)}."]
    if host:
        texts.append(f"The host holds up to {format_bytes(host * nodes)} for the {nodes} GPUs of a node.")
    rows = [_row(each) for each in report.phases]
    strong = (report.phases.index(peak),)
    return [
        *heading("Phases of an iteration (estimate)"),
        table(HEADER, rows, align="lrrrrrrr", strong=strong),
        "",
        paragraph(" ".join(texts)),
    ]


def _row(phase: PhaseMemory) -> tuple[str, ...]:
    most = phase.device_range_bytes[1]
    sizes = (phase.states_bytes, phase.forward_bytes, phase.engine_bytes, phase.device_bytes, most, phase.host_bytes)
    return (phase.name, str(phase.rank), *map(format_bytes, sizes))
