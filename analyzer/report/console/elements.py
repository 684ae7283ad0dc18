"""Parts that the sections of the console report are made of: headings, paragraphs, lists and tables, drawn by rich."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from analyzer.report.visible import visible

INDENT: Final = 2
GAP: Final = 2
"""Spaces between two columns."""
HEADING, DIM, GOOD, BAD, KEY = "bold cyan", "dim", "bold green", "bold red", "bold"
NO_BREAK: Final = "\ue000"
"""A space at which no line is broken. Rich breaks lines at every Unicode space, so this is a private-use character of width 1,
which `report.draw` replaces by a space."""
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:B|[KMGT]iB)\b)")


def styled(text: str, style: str = "") -> Text:
    """Text in which a size stays on one line with its unit, without control characters."""
    return Text(_UNIT.sub(NO_BREAK, visible(text)), style)


def heading(title: str) -> list[RenderableType]:
    """A blank line, and a title with a rule to the right edge."""
    return ["", Rule(Text(f"── {visible(title)}", HEADING), align="left", style=DIM)]


def paragraph(text: str, *, style: str = "", indent: int = INDENT) -> RenderableType:
    """Wrapped text."""
    return Padding(styled(text, style), (0, 0, 0, indent), expand=False)


def points(texts: Sequence[str]) -> RenderableType:
    """A bullet list of wrapped texts."""
    grid = Table.grid(padding=(0, 1))
    for text in texts:
        grid.add_row("·", styled(text))
    return Padding(grid, (0, 0, 0, INDENT), expand=False)


def fields(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Names and their values, each value wrapped in its column."""
    grid = Table.grid(padding=(0, GAP))
    grid.add_column(no_wrap=True, style=DIM)
    for name, value in rows:
        grid.add_row(visible(name), styled(value))
    return Padding(grid, (0, 0, 0, INDENT), expand=False)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str,
    wrapped: Collection[int] = (0,),
    strong: Collection[int] = (),
    most: int | None = None,
) -> RenderableType:
    """Rows of cells under a header; a header of empty cells is not printed.

    `align` has one letter for each column, l or r. Columns whose index is in `wrapped` are wrapped if the table is too wide.
    Rows whose index is in `strong` are emphasized. `most`: maximum width of the columns after the first.
    """
    grid = Table(
        box=None, show_header=any(header), header_style=DIM, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False, expand=False
    )
    for index, (title, letter) in enumerate(zip(header, align, strict=True)):
        grid.add_column(
            title,
            justify="right" if letter == "r" else "left",
            no_wrap=index not in wrapped,
            overflow="fold" if index in wrapped else "ellipsis",
            max_width=most if index else None,
        )
    for index, row in enumerate(rows):
        grid.add_row(*(styled(cell) for cell in row), style=KEY if index in strong else None)
    return Padding(grid, (0, 0, 0, INDENT), expand=False)
