"""Parts that the sections of the console report are made of: headings, paragraphs, lists and tables, drawn by rich."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
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
_UNLIMITED: Final = 10_000
"""Columns of a terminal in which every table fits."""
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:B|[KMGT]iB)\b|=$)")


def styled(text: str, style: str = "") -> Text:
    """Text in which a size stays on one line with its unit, and a number with a mark after it, without control characters."""
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
    Numbers, the columns with r, are never cut: if a table is too wide, all cells are wrapped, those of numbers between words only.
    Rows whose index is in `strong` are emphasized. `most`: maximum width of the columns after the first, exceeded by longer words.
    """
    columns = [_Column(letter == "r", index in wrapped, most if index else None) for index, letter in enumerate(align)]
    cells = [[styled(cell).plain for cell in row] for row in (header, *rows)]
    return Padding(_Table(columns, cells, strong), (0, 0, 0, INDENT), expand=False)


class _Column(NamedTuple):
    """How the cells of a column are drawn."""

    is_number: bool
    wrapped: bool
    most: int | None
    """Maximum width; None for no limit."""

    def broken(self, text: str, longest: int, *, narrow: bool) -> str:
        """A number in lines of `most` characters, or of the longest word in a `narrow` table; other text as it is."""
        if not self.is_number or not (narrow or self.most):
            return text
        width = longest if narrow else max(longest, self.most or 0)
        if len(text) <= width:
            return text
        return "\n".join(textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False))


class _Table:
    """A table that is drawn as rich draws it if it fits, and with wrapped cells otherwise."""

    def __init__(self, columns: Sequence[_Column], cells: Sequence[Sequence[str]], strong: Collection[int]) -> None:
        self.columns, self.cells, self.strong = columns, cells, strong

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._drawn(narrow=False)
        needed = Measurement.get(console, options.update_width(_UNLIMITED), wide).maximum
        yield wide if needed <= options.max_width else self._drawn(narrow=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._drawn(narrow=False))

    def _drawn(self, *, narrow: bool) -> Table:
        header, *rows = self.cells
        grid = Table(
            box=None,
            show_header=any(header),
            header_style=DIM,
            padding=(0, GAP, 0, 0),
            pad_edge=False,
            show_edge=False,
            expand=False,
        )
        longest = [max(len(word) for cell in cells for word in cell.split(" ")) for cells in zip(*self.cells, strict=True)]
        for column, title, width in zip(self.columns, header, longest, strict=True):
            grid.add_column(
                column.broken(title, width, narrow=narrow),
                justify="right" if column.is_number else "left",
                no_wrap=column.is_number or not (column.wrapped or narrow),
                overflow="fold" if column.wrapped or narrow else "ellipsis",
                min_width=width if column.is_number else None,
                max_width=None if column.is_number else column.most,
            )
        for index, row in enumerate(rows):
            shown = [
                Text(column.broken(cell, width, narrow=narrow))
                for column, cell, width in zip(self.columns, row, longest, strict=True)
            ]
            grid.add_row(*shown, style=KEY if index in self.strong else None)
        return grid
