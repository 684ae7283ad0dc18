"""The report on a terminal or in a file: sections one after the other, coloured by rich where a terminal shows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, Literal, TextIO

from analyzer.report.console import communication_section, model_section
from analyzer.report.console.launch_section import assumptions, job
from analyzer.report.console.memory_section import memory
from analyzer.report.console.text import Line, plain
from analyzer.report.console.timeline_section import timelines
from analyzer.report.console.verdict_section import verdict
from analyzer.results import Report

Detail = Literal["summary", "full"]

PLAIN_WIDTH: Final = 100
"""Columns where neither a terminal nor COLUMNS says how many there are."""
LEAST_WIDTH: Final = 60
ASCII: Final = str.maketrans({"─": "-", "│": "|", "├": "|", "└": "`", "…": "~", "–": "-", "×": "x", "·": "*"})


def render(report: Report, *, width: int, detail: Detail = "summary") -> list[Line]:
    """Every section as lines of at most `width` characters; figures and names that are longer than that stay whole."""
    whole = detail == "full"
    width = max(width, LEAST_WIDTH)
    return [
        *job(report, width=width),
        *model_section.full_model(report, width=width, whole=whole),
        *memory(report, width=width, whole=whole),
        *timelines(report, width=width),
        *verdict(report, width=width),
        *communication_section.summary(report, width=width),
        *communication_section.pipeline(report, width=width, whole=whole),
        *communication_section.data(report, width=width, whole=whole),
        *communication_section.tensor(report, width=width, whole=whole),
        *communication_section.others(report, width=width, whole=whole),
        *model_section.rank_trees(report, width=width, whole=whole),
        *assumptions(report, width=width),
    ]


def print_report(report: Report, *, detail: Detail = "summary", stream: TextIO) -> None:
    """Writes the report to `stream`: in colour on a terminal unless NO_COLOR is set, else as plain text.

    The width is COLUMNS, else that of the terminal. A stream whose encoding has no line drawing gets ASCII.
    """
    print_lines(lambda width: render(report, width=width, detail=detail), stream=stream)


def print_lines(draw: Callable[[int], Sequence[Line]], *, stream: TextIO) -> None:
    """Writes what `draw` makes for the width of `stream`, in colour or plain as `print_report` says."""
    lines = draw(_width(stream))
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and _can_draw(stream):
        _print_styled(lines, stream)
        return
    text = "\n".join(map(plain, lines)) + "\n"
    if not _can_draw(stream):
        text = text.translate(ASCII).encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii")
    stream.write(text)


def _width(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH
    except (OSError, ValueError):
        return PLAIN_WIDTH


def _can_draw(stream: TextIO) -> bool:
    try:
        "─│├└…–×·".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _print_styled(lines: Sequence[Line], stream: TextIO) -> None:
    from rich.console import Console  # 20 ms, and only a terminal needs it
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)
