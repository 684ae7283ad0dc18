"""Lines of text with styles, wrapped and aligned to a width. Sections make lines; `console` prints them.

A style is a word of rich's markup ("bold", "red") or empty; it never changes what is printed, only how.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Span = tuple[str, str]
"""Text and its style."""
Line = tuple[Span, ...]

GAP = "  "
INDENT = "  "
HEADING, DIM, GOOD, BAD, KEY = "bold cyan", "dim", "bold green", "bold red", "bold"


def line(text: str = "", style: str = "") -> Line:
    """A line of one style."""
    return ((text, style),) if text else ()


def plain(of: Line) -> str:
    """The line without styles, and without blanks at its end."""
    return "".join(text for text, _ in of).rstrip()


def heading(title: str, *, width: int) -> list[Line]:
    """An empty line and a title with a rule to the right edge."""
    return [(), ((f"── {title} ", HEADING), ("─" * max(0, width - len(title) - 4), DIM))]


def fit(text: str, width: int) -> str:
    """`text` in at most `width` characters; a cut is marked with …"""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


_BREAKS = re.compile(r" +(?!(?:B|[KMGT]iB)\b)")


def wrap(text: str, *, width: int, first: str = "", rest: str = "", style: str = "") -> list[Line]:
    """`text` broken at blanks; `first` opens the first line and `rest` the others.

    A longer word stands alone, whole, and a size stays with its unit.
    """
    lines: list[str] = []
    current, opening = "", first
    for word in _BREAKS.split(text):
        if current and len(opening) + len(current) + 1 + len(word) > width:
            lines.append(opening + current)
            current, opening = word, rest
        else:
            current = f"{current} {word}" if current else word
    return [line(text, style) for text in (*lines, opening + current)]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, width: int, strong: Sequence[int] = ()
) -> list[Line]:
    """Rows under a header, columns aligned by a letter each ('l' or 'r'); rows whose index is in `strong` stand out.

    Where the columns do not fit the width, every row becomes a block of its own: its first cell, then a line for each
    of the others with the name of its column. Nothing is cut and no line breaks inside a figure.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if len(INDENT) + sum(widths) + len(GAP) * (len(widths) - 1) > width:
        return _blocks(header, rows, width=width)

    def text(cells: Sequence[str]) -> str:
        put = [cell.ljust(w) if a == "l" else cell.rjust(w) for cell, w, a in zip(cells, widths, align, strict=True)]
        return INDENT + GAP.join(put).rstrip()

    body = [line(text(row), KEY if index in strong else "") for index, row in enumerate(rows)]
    return [line(text(header), DIM), *body]


def _blocks(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> list[Line]:
    label = max(map(len, header[1:]))
    lines: list[Line] = []
    for row in rows:
        lines.extend(wrap(row[0], width=width, first=INDENT, rest=INDENT * 2, style=KEY))
        lines.extend(
            line(f"{INDENT * 2}{name.ljust(label)}{GAP}{cell}") for name, cell in zip(header[1:], row[1:], strict=True) if cell
        )
    return lines
