"""Allocated bytes over an iteration, as a chart for each rank class that was run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.memory.verdict import highest
from analyzer.report.console.elements import INDENT, heading, paragraph
from analyzer.results import Report, Timeline
from analyzer.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

HEIGHT: Final = 6
STEPS: Final = " ▁▂▃▄▅▆▇█"


def timelines(report: Report, *, width: int, full: bool) -> list[RenderableType]:
    """A chart of allocated bytes for each rank class, unless `full` for the highest-memory one only.

    Nothing for a report by formula.
    """
    if not report.timelines:
        return []
    tightest = highest(report.ranks)
    lines = heading("Allocated bytes over an iteration")
    for rank, timeline in zip(report.ranks, report.timelines, strict=True):
        if not full and rank is not tightest:
            continue
        totals = _columns(timeline, width - 2 * INDENT)
        top, bottom = max(totals, default=0), min(totals, default=0)
        lines.append(paragraph(f"stage {rank.pipeline_rank}: from {format_bytes(bottom)} to {format_bytes(top)}"))
        lines.extend(" " * (2 * INDENT) + row for row in _chart(totals, bottom=bottom, top=top))
    return lines


def _columns(timeline: Timeline, columns: int) -> list[int]:
    """The maximum total of each column."""
    totals = [sum(point) for point in timeline.points]
    if len(totals) <= columns:
        return totals
    return [max(totals[len(totals) * c // columns : len(totals) * (c + 1) // columns]) for c in range(columns)]


def _chart(totals: list[int], *, bottom: int, top: int) -> list[str]:
    """Rows of block characters, the highest first. The lowest total has an eighth of a row."""
    span = max(1, top - bottom)
    heights = [1 + (total - bottom) * (HEIGHT * 8 - 1) // span for total in totals]
    return ["".join(STEPS[max(0, min(8, height - 8 * row))] for height in heights) for row in reversed(range(HEIGHT))]
