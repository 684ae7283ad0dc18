"""Bytes in use over an iteration, as a small chart for each rank class that was run."""

from __future__ import annotations

from typing import Final

from analyzer.report.console.text import INDENT, Line, heading, line
from analyzer.results import Report, Timeline
from analyzer.units import format_bytes

HEIGHT: Final = 6
STEPS: Final = " ▁▂▃▄▅▆▇█"


def timelines(report: Report, *, width: int) -> list[Line]:
    """A chart of the total for each rank class; nothing for a report by formula."""
    if not report.timelines:
        return []
    lines = heading("Bytes in use over an iteration", width=width)
    for rank, timeline in zip(report.ranks, report.timelines, strict=True):
        totals = _columns(timeline, width - 2 * len(INDENT))
        top, bottom = max(totals, default=0), min(totals, default=0)
        lines.append(line(f"{INDENT}stage {rank.pipeline_rank}: from {format_bytes(bottom)} to {format_bytes(top)}"))
        lines.extend(line(INDENT * 2 + row) for row in _chart(totals, bottom=bottom, top=top))
    return lines


def _columns(timeline: Timeline, columns: int) -> list[int]:
    """The fullest total of each column."""
    totals = [sum(point) for point in timeline.points]
    if len(totals) <= columns:
        return totals
    return [max(totals[len(totals) * c // columns : len(totals) * (c + 1) // columns]) for c in range(columns)]


def _chart(totals: list[int], *, bottom: int, top: int) -> list[str]:
    """Rows of blocks, the highest first. The lowest total is an eighth of a row high."""
    span = max(1, top - bottom)
    heights = [1 + (total - bottom) * (HEIGHT * 8 - 1) // span for total in totals]
    return ["".join(STEPS[max(0, min(8, height - 8 * row))] for height in heights) for row in reversed(range(HEIGHT))]
