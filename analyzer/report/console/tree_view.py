"""A tree of modules as lines: names with guides, figures in columns, and texts beside them or, where narrow, below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from analyzer.modules.tree import Module
from analyzer.report import tree_sums as folds
from analyzer.report.console.text import DIM, GAP, INDENT, KEY, Line, fit, line, wrap

LEAST_LABEL = 24
"""Characters that a name always has, however narrow the screen."""


class Figure(NamedTuple):
    """A column of numbers. `value` is what a module and all below it amount to, as text."""

    title: str
    value: Callable[[Module], str]


class Note(NamedTuple):
    """A column of words about a module alone, several lines high perhaps."""

    title: str
    value: Callable[[Module], tuple[str, ...]]


class _Row(NamedTuple):
    label: str
    below: str
    """Guides for a line below the label."""
    figures: tuple[str, ...]
    notes: tuple[tuple[str, ...], ...]


def tree_view(
    root: Module,
    *,
    figures: Sequence[Figure],
    notes: Sequence[Note],
    width: int,
    whole: bool,
    known: Sequence[Module] = (),
) -> list[Line]:
    """The tree of `root`; siblings alike stand once, with their number before each figure, unless `whole`.

    What is below the modules of `known`, which the reader has seen, is left out.
    """
    rows = list(_rows(folds.Run(root, 1, root.name), figures, notes, known, whole=whole))
    used = [index for index in range(len(notes)) if any(row.notes[index] for row in rows)]
    figure_widths = [max(len(f.title), *(len(row.figures[i]) for row in rows)) for i, f in enumerate(figures)]
    note_widths = {i: max(len(notes[i].title), *(len(t) for row in rows for t in row.notes[i])) for i in used}
    # figures stand as near to the names as they can; notes come beside them while there is room
    room = width - len(INDENT) - sum(w + len(GAP) for w in figure_widths)
    label_width = min(max(len(row.label) for row in rows), max(LEAST_LABEL, room))
    beside: list[int] = []
    left = room - label_width
    for index in used:
        if left < note_widths[index] + len(GAP):
            break
        beside.append(index)
        left -= note_widths[index] + len(GAP)

    def put(label: str, numbers: Sequence[str], texts: Sequence[str]) -> str:
        cells = [fit(label, label_width).ljust(label_width)]
        cells += [number.rjust(w) for number, w in zip(numbers, figure_widths, strict=True)]
        cells += [text.ljust(note_widths[i]) for i, text in zip(beside, texts, strict=True)]
        return INDENT + GAP.join(cells).rstrip()

    lines = [line(put("", [f.title for f in figures], [notes[i].title for i in beside]), DIM)]
    blank = ("",) * len(figures)
    for row in rows:
        height = max([1, *(len(row.notes[i]) for i in beside)])
        for nth in range(height):
            texts = [row.notes[i][nth] if nth < len(row.notes[i]) else "" for i in beside]
            text = put(row.label, row.figures, texts) if nth == 0 else put(row.below, blank, texts)
            lines.append(line(text, KEY if row is rows[0] else ""))
        for index in used:
            if index not in beside:
                opening = INDENT + row.below
                for text in row.notes[index]:
                    lines.extend(wrap(text, width=width, first=opening, rest=opening, style=DIM))
    return lines


def _rows(
    run: folds.Run,
    figures: Sequence[Figure],
    notes: Sequence[Note],
    known: Sequence[Module],
    *,
    whole: bool,
    lead: str = "",
    guide: str = "",
) -> Iterator[_Row]:
    """Rows of a run and all below it; `lead` opens its own line and `guide` those below."""
    module = run.module
    seen = bool(module.children) and module in known
    times = f"{run.length} × " if run.length > 1 else ""
    children = [] if seen else list(folds.runs(module.children, whole=whole))
    yield _Row(
        label=lead + run.name,
        below=guide + ("│  " if children else "   "),
        figures=tuple(f"{times}{value}" if (value := f.value(module)) else "" for f in figures),
        notes=(("as above",), *[()] * (len(notes) - 1)) if seen else tuple(n.value(module) for n in notes),
    )
    for child in children:
        last = child is children[-1]
        own, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _rows(child, figures, notes, known, whole=whole, lead=guide + own, guide=guide + below)
