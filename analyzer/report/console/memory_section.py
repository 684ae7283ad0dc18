"""Memory of each rank: its parts, its peak and where the peak is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analyzer.layout.groups import RankRanges
from analyzer.memory.verdict import highest
from analyzer.report.console import names
from analyzer.report.console.text import DIM, GAP, INDENT, Line, fit, heading, line, table, wrap
from analyzer.results import MemoryPart, RankClass, RankMemory, Report
from analyzer.units import format_bytes, format_count

COLUMNS_SHOWN = 6
LABEL = "  peak of the first iteration"
COLUMN = 15
"""Width of a rank class: '1,024.00 GiB' and room for 'stages 1–14'."""


class _Column(NamedTuple):
    """Rank classes in a row whose memory is the same, by one of them."""

    rank: RankClass
    stages: tuple[int, ...]
    ranks: RankRanges
    layers: tuple[int, ...]


def memory(report: Report, *, width: int, whole: bool) -> list[Line]:
    """A column for each rank class, parts above their sums; then what the peak of the highest-memory rank is made of."""
    tightest = highest(report.ranks)
    columns = [_column(each) for each in report.ranks] if whole else _merge(report.ranks)
    shown = columns if whole else _shorten(columns, tightest)
    lines = heading("Memory of each rank", width=width)
    per_block = max(1, (width - len(INDENT) - len(LABEL)) // (COLUMN + len(GAP)))
    for start in range(0, len(shown), per_block):
        block = shown[start : start + per_block]
        header = ("", *(names.stages(column.stages) for column in block))
        lines.extend([*table(header, _rows(block), align="l" + "r" * len(block), width=width, strong=_SUMS), ()])
    if len(shown) < len(columns):
        sizes = [column.rank.memory.device_bytes for column in columns if column not in shown]
        text = (
            f"The stages that are not shown lie between {format_bytes(min(sizes))} and {format_bytes(max(sizes))} "
            "on the device; --info-detail full prints them."
        )
        lines.extend([*wrap(text, width=width, first=INDENT, rest=INDENT, style=DIM), ()])
    for rank in [column.rank for column in shown] if whole else [tightest]:
        lines.extend([*_made_of(rank, width=width), ()])
    return lines[:-1]


def _column(rank: RankClass) -> _Column:
    return _Column(rank, (rank.pipeline_rank,), rank.ranks, tuple(layer for chunk in rank.chunks for layer in chunk.layers))


def _merge(ranks: Sequence[RankClass]) -> list[_Column]:
    columns: list[_Column] = []
    for column in map(_column, ranks):
        last = columns[-1] if columns else None
        if last and last.rank.memory == column.rank.memory and last.rank.parameters == column.rank.parameters:
            merged = _joined(last.ranks + column.ranks)
            columns[-1] = _Column(last.rank, last.stages + column.stages, merged, last.layers + column.layers)
        else:
            columns.append(column)
    return columns


def _joined(ranges: RankRanges) -> RankRanges:
    """Sorted ranges with neighbours put together."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _shorten(columns: list[_Column], tightest: RankClass) -> list[_Column]:
    """The first and last columns, and that of the highest-memory rank."""
    if len(columns) <= COLUMNS_SHOWN:
        return columns
    kept = {0, 1, len(columns) - 2, len(columns) - 1, *(i for i, column in enumerate(columns) if column.rank is tightest)}
    return [columns[index] for index in sorted(kept)]


_SUMS = (7, 10)
"""Rows of `_rows` that are sums."""


def _rows(block: Sequence[_Column]) -> list[list[str]]:
    sizes = [
        ("  parameters", "parameters_bytes"),
        ("+ gradients", "gradients_bytes"),
        ("+ optimizer states", "optimizer_bytes"),
        ("+ runtime", "runtime_bytes"),
        ("+ saved activations", "activations_bytes"),
        ("+ temporary at the peak", "transient_bytes"),
        ("= peak allocated", "peak_allocated_bytes"),
        (LABEL, "peak_allocated_first_iteration_bytes"),
        ("  allocated after a step", "allocated_bytes"),
        ("    beyond states, runtime", "beyond_bytes"),
        ("  peak reserved", "peak_reserved_bytes"),
        ("  on the device", "device_bytes"),
    ]
    return [
        ["  ranks", *(fit(names.ranges(each.ranks), COLUMN) for each in block)],
        ["  layers", *(_layers(each.layers) for each in block)],
        ["  parameters in all", *(format_count(each.rank.parameters) for each in block)],
        *([label, *(_size(each.rank.memory, field) for each in block)] for label, field in sizes),
    ]


def _size(memory: RankMemory, field: str) -> str:
    if field != "beyond_bytes":
        return format_bytes(getattr(memory, field))
    named = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    return format_bytes(memory.allocated_bytes - named)


def _layers(layers: tuple[int, ...]) -> str:
    """Their numbers, or how many there are where the numbers take too much room."""
    numbers = names.numbers(sorted(layers)) or "none"
    return numbers if len(numbers) <= COLUMN else f"{len(layers)} from {min(layers)}"


def _made_of(rank: RankClass, *, width: int) -> list[Line]:
    """Where the peak of a rank is, and its runtime and temporary memory by name."""
    m = rank.memory
    where = f"Peak of rank {rank.ranks[0][0]}, {format_bytes(m.peak_allocated_bytes)}: {m.peak_at}"
    if m.microbatches_in_flight:
        chunks = " + ".join(map(str, m.microbatches_in_flight))
        where += f"; {chunks} {'microbatch' if chunks == '1' else 'microbatches'} in flight"
    lines = wrap(f"{where}.", width=width, first=INDENT, rest=INDENT)
    for title, parts in (("runtime", m.runtime_parts), ("temporary at the peak", m.transient_parts)):
        if parts:
            lines.extend([line(f"{INDENT}{title}", DIM), *_parts(parts, width=width)])
    return lines


def _parts(parts: Sequence[MemoryPart], *, width: int) -> list[Line]:
    rows = [(f"  {part.name}", format_bytes(part.bytes)) for part in parts]
    return table(("", ""), rows, align="lr", width=width)[1:]
