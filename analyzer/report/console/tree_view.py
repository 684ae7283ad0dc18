"""A tree of modules drawn by rich: names, columns of figures, and notes beside the figures or, if narrow, below the names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from analyzer.modules.tree import Module
from analyzer.report.console.elements import DIM, GAP, INDENT, KEY, styled
from analyzer.report.tree_sums import Run, runs

GUIDE: Final = 4
"""Characters of rich's guides for each level."""
LEAST_LABEL: Final = 24
"""Minimum width of the names."""
LEAST_NOTE: Final = 32
"""Minimum width of a column of notes."""


class Figure(NamedTuple):
    """A column of numbers. `value` is the sum over a module and its children, as text."""

    title: str
    value: Callable[[Module], str]


class _Row(NamedTuple):
    depth: int
    name: str
    figures: tuple[str, ...]
    notes: tuple[str, ...]


def tree_view(
    root: Module,
    *,
    figures: Sequence[Figure],
    notes: Callable[[Module], tuple[str, ...]],
    width: int,
    known: Sequence[Module] = (),
) -> RenderableType:
    """The tree of `root`. Consecutive equal siblings are printed once, with their number before each figure.

    The children of modules in `known` are left out: they are printed above. On a narrow terminal the figures are notes too.
    """
    rows = list(_rows(Run(root, 1, root.name), figures, notes, known))
    figure_widths = [max(len(figure.title), *(len(row.figures[i]) for row in rows)) for i, figure in enumerate(figures)]
    free = width - INDENT - sum(size + GAP for size in figure_widths)
    if free - max(GUIDE * row.depth for row in rows) < LEAST_LABEL:
        rows, figures, free = [_with_figures_as_notes(row, figures) for row in rows], (), width - INDENT
    names = max(GUIDE * row.depth + len(row.name) for row in rows)
    below = max((GUIDE * row.depth + INDENT + len(note) for row in rows for note in row.notes), default=0)
    beside = free - names - GAP >= LEAST_NOTE
    label = max(LEAST_LABEL, min(names if beside else max(names, below), free))
    wrapped = [_wrapped(row, width=free - label - GAP if beside else label - GUIDE * row.depth - INDENT) for row in rows]
    heights = [max(1, len(lines)) if beside else 1 + len(lines) for lines in wrapped]

    table = Table(box=None, show_header=bool(figures), header_style=DIM, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(width=label)
    for figure in figures:
        table.add_column(figure.title, justify="right", no_wrap=True)
    cells: list[RenderableType] = [_tree(rows, wrapped, heights, beside=beside)]
    for index in range(len(figures)):
        cells.append("\n".join(row.figures[index] + "\n" * (height - 1) for row, height in zip(rows, heights, strict=True)))
    if beside and any(row.notes for row in rows):
        table.add_column("shapes and collectives" if any(":" in note for row in rows for note in row.notes) else "shapes")
        cells.append(Text("\n").join(_padded(lines, height) for lines, height in zip(wrapped, heights, strict=True)))
    table.add_row(*cells)
    return Padding(table, (0, 0, 0, INDENT), expand=False)


def _tree(rows: Sequence[_Row], wrapped: Sequence[Sequence[Text]], heights: Sequence[int], *, beside: bool) -> Tree:
    """The names as a tree, each label as high as its row; the notes are part of the labels unless they are `beside`."""
    nodes: list[Tree] = []
    for row, lines, height in zip(rows, wrapped, heights, strict=True):
        name = Text(row.name, KEY if row.depth == 0 else "", no_wrap=True, overflow="ellipsis")
        if beside:
            name.append("\n" * (height - 1))
        else:
            for line in lines:
                name.append("\n" + " " * INDENT)
                name.append(line.plain, DIM)
        nodes[row.depth :] = [nodes[row.depth - 1].add(name) if row.depth else Tree(name, guide_style=DIM)]
    return nodes[0]


def _with_figures_as_notes(row: _Row, figures: Sequence[Figure]) -> _Row:
    texts = tuple(f"{value} {figure.title}" for value, figure in zip(row.figures, figures, strict=True) if value)
    return row._replace(figures=(), notes=(*texts, *row.notes))


def _wrapped(row: _Row, *, width: int) -> list[Text]:
    """The notes of a row as lines of at most `width` characters."""
    console = Console(width=width, height=1)  # without a height, rich reads COLUMNS and LINES, which may have no number
    return [line for note in row.notes for line in styled(note).wrap(console, max(1, width))]


def _padded(lines: Sequence[Text], height: int) -> Text:
    return Text("\n").join([*lines, *[Text("")] * (height - len(lines))])


def _rows(
    run: Run, figures: Sequence[Figure], notes: Callable[[Module], tuple[str, ...]], known: Sequence[Module], *, depth: int = 0
) -> Iterator[_Row]:
    """Rows of a run of equal modules and of its children."""
    module = run.module
    seen = bool(module.children) and module in known
    times = f"{run.length} × " if run.length > 1 else ""
    yield _Row(
        depth=depth,
        name=run.name,
        figures=tuple(f"{times}{value}" if (value := figure.value(module)) else "" for figure in figures),
        notes=("as above",) if seen else notes(module),
    )
    for child in () if seen else runs(module.children):
        yield from _rows(child, figures, notes, known, depth=depth + 1)
