"""The console report: the verdict and the key figures, memory, and the sections that --info-detail names."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from analyzer.report.console import communication_section, groups_section, summary_section, tree_section
from analyzer.report.console.elements import NO_BREAK, heading, paragraph
from analyzer.report.console.memory_section import memory
from analyzer.report.console.timeline_section import timelines
from analyzer.report.console.verdict_section import advice, one_line, verdict
from analyzer.report.visible import visible
from analyzer.results import Report
from analyzer.units import natural

LINE: Final = "line"
"""The value of --info-detail with which the report is one line."""
PLAIN_WIDTH: Final = 100
"""Columns if neither COLUMNS nor a terminal gives them."""
WIDEST: Final = 10_000
"""Columns that are used of a larger COLUMNS: lines are filled with spaces."""
LEAST_WIDTH: Final = 60
ASCII: Final = str.maketrans({"─": "-", "│": "|", "├": "|", "└": "`", "…": "~", "–": "-", "×": "x", "·": "*"})


def sections(report: Report, *, width: int, detail: Collection[str] = ()) -> list[RenderableType]:
    """The parts of the report, in order. `detail`: sections to print in full; `full` names all of them.

    Without it memory is printed for the highest-memory rank only, and the other sections as a summary.
    """
    named = {*summary_section.SECTIONS} if "full" in detail else {*detail}
    short = not named
    unknown = summary_section.unknown(report)
    return [
        *([*verdict(report), "", *unknown] if report.verdict.withheld else [*unknown, *verdict(report)]),
        *summary_section.key_figures(report),
        *advice(report),
        *summary_section.warnings(report),
        *(_memory(report, width=width, full=not short) if short or "memory" in named else ()),
        *(_phases(report) if short or "memory" in named else ()),
        *(_time(report, full=not short) if short or "time" in named else ()),
        *(_summary(report) if short else ()),
        *(groups_section.groups(report) if "groups" in named else ()),
        *(communication_section.communication(report) if "communication" in named else ()),
        *(tree_section.trees(report, width=width) if "tree" in named else ()),
        *summary_section.assumptions(report),
        *summary_section.how_to_see_more(report, detail),
    ]


def _memory(report: Report, *, width: int, full: bool) -> list[RenderableType]:
    return [*memory(report, width=width, full=full), *timelines(report, width=width, full=full)]


def _phases(report: Report) -> list[RenderableType]:
    """The section is imported only for launches with phases."""
    if not report.phases:
        return []
    from analyzer.report.console.phases_section import phases

    return phases(report)


def _time(report: Report, *, full: bool) -> list[RenderableType]:
    """The section is imported only for launches with a time, for a short start-up."""
    if report.time is None:
        return []
    from analyzer.report.console.time_section import time

    return time(report, full=full)


def _summary(report: Report) -> list[RenderableType]:
    """A sentence each about groups and communication."""
    texts = (groups_section.summary(report), communication_section.summary(report))
    return [*heading("Groups and communication"), *map(paragraph, texts)]


def print_report(report: Report, *, detail: Collection[str] = (), stream: TextIO) -> None:
    """Writes the report to `stream`: in colour on a terminal unless NO_COLOR is set, otherwise as plain text.

    The width is COLUMNS, otherwise that of the terminal. A stream whose encoding has no line drawing gets ASCII.
    """
    if LINE in detail:
        getattr(stream, "drawn", stream).write(visible(one_line(report)) + "\n")
        return
    write(lambda width: sections(report, width=width, detail=detail), stream=stream)


def write(parts: Callable[[int], Sequence[RenderableType]], *, stream: TextIO) -> None:
    """Writes the parts of a report, made for the width of `stream`, as `print_report` does."""
    width = max(_width(stream), LEAST_WIDTH)
    unicode = _has_line_drawing(stream)
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and unicode
    text = draw(parts(width), width=width, colour=colour)
    if not unicode:
        encoding = stream.encoding or "ascii"
        text = text.translate(ASCII).encode(encoding, "replace").decode(encoding)
    getattr(stream, "drawn", stream).write(text)


class _Visible:
    """A part of the report without control characters, except those that rich adds for colours."""

    def __init__(self, part: RenderableType) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.part, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, lines=True))


def draw(parts: Sequence[RenderableType], *, width: int, colour: bool = False) -> str:
    """The parts as text. Without colour it depends on nothing but the parts and the width."""
    console = Console(
        file=io.StringIO(),
        width=width,
        height=PLAIN_WIDTH,  # without a height, rich reads COLUMNS and LINES, which may have no number
        force_terminal=colour,
        color_system="auto" if colour else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(_Visible(part), crop=False)  # commands to paste are whole
    text = captured.get().replace(NO_BREAK, " ")
    return text if colour else "\n".join(line.rstrip() for line in text.split("\n"))


def _width(stream: TextIO) -> int:
    columns = natural(os.environ.get("COLUMNS", ""))
    if columns:
        return min(columns, WIDEST)
    try:
        return os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH
    except (OSError, ValueError):
        return PLAIN_WIDTH


def _has_line_drawing(stream: TextIO) -> bool:
    try:
        "─│├└…–×·".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
