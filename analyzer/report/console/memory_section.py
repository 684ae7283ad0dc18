"""Memory of the ranks: parts, peak, and what the peak consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from analyzer.layout.groups import RankRanges
from analyzer.memory.verdict import highest
from analyzer.report.console import names
from analyzer.report.console.elements import DIM, GAP, INDENT, heading, paragraph, table
from analyzer.results import MemoryPart, RankClass, RankMemory, Report
from analyzer.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

PARTS_SHOWN = 3
"""Parts of a sum that are printed one by one in the short report."""
LABEL = "    other tensors kept between iterations"
BETWEEN = "between_iterations"
COLUMN = 13
"""Width of a column of sizes."""
SIZES = (
    ("  parameters", "parameters_bytes"),
    ("+ gradients", "gradients_bytes"),
    ("+ optimizer states", "optimizer_bytes"),
    ("+ workspaces and caches", "runtime_bytes"),
    ("+ saved activations", "activations_bytes"),
    ("+ temporary tensors at the peak", "transient_bytes"),
    ("= peak allocated", "peak_allocated_bytes"),
    ("  peak of the first iteration", "peak_allocated_first_iteration_bytes"),
    ("  allocated between iterations", "allocated_bytes"),
    (LABEL, BETWEEN),
    ("  peak reserved", "peak_reserved_bytes"),
    ("  on the device", "device_bytes"),
)
"""Rows of sizes: label, and field of RankMemory or `BETWEEN`."""
SUMS = ("= peak allocated", "  on the device")
"""Labels of the rows that are sums."""


class _Column(NamedTuple):
    """Consecutive rank classes of equal memory, represented by the first one."""

    rank: RankClass
    stages: tuple[int, ...]
    ranks: RankRanges
    layers: tuple[int, ...]


def memory(report: Report, *, width: int, full: bool) -> list[RenderableType]:
    """A column for each rank class, with the parts above their sums; and what each peak consists of.

    Unless `full`: the stage of the highest-memory rank only, with the largest parts of its peak.
    """
    tightest = highest(report.ranks)
    columns = _merge(report.ranks)
    per_block = max(1, (width - INDENT - len(LABEL)) // (COLUMN + GAP))
    shown = columns if full else _of_stage(columns, tightest)[:per_block]
    title = "Memory of each rank" if full else "Memory of the highest-memory rank"
    lines = heading(title)
    for start in range(0, len(shown), per_block):
        block = shown[start : start + per_block]
        header = ("", *(names.stages(column.stages) for column in block))
        lines += [""] if start else []
        rows = _rows(block)
        strong = [index for index, row in enumerate(rows) if row[0] in SUMS]
        lines.append(table(header, rows, align="l" + "r" * len(block), wrapped=(), strong=strong, most=COLUMN))
    sizes = [column.rank.memory.device_bytes for column in columns if column not in shown]
    if sizes:
        least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
        text = f"Other ranks need {least if least == most else f'{least} to {most}'} on the device."
        lines.append(paragraph(text, style=DIM))
    for rank in [column.rank for column in shown] if full else [tightest]:
        lines += ["", *_peak(rank, full=full)]
    return lines


def _of_stage(columns: Sequence[_Column], tightest: RankClass) -> list[_Column]:
    """The columns of the stage of the highest-memory rank, that of the rank first."""
    found = [column for column in columns if tightest.pipeline_rank in column.stages]
    return sorted(found, key=lambda column: -column.rank.memory.device_bytes)


def _merge(ranks: Sequence[RankClass]) -> list[_Column]:
    """One column for consecutive classes of equal memory and parameters."""
    columns: list[_Column] = []
    for rank in ranks:
        layers = tuple(layer for chunk in rank.chunks for layer in chunk.layers)
        last = columns[-1] if columns else None
        if last and last.rank.memory == rank.memory and last.rank.parameters == rank.parameters:
            stages = tuple(dict.fromkeys((*last.stages, rank.pipeline_rank)))
            columns[-1] = _Column(last.rank, stages, _joined(last.ranks + rank.ranks), last.layers + layers)
        else:
            columns.append(_Column(rank, (rank.pipeline_rank,), rank.ranks, layers))
    return columns


def _joined(ranges: RankRanges) -> RankRanges:
    """Sorted ranges, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _rows(block: Sequence[_Column]) -> list[list[str]]:
    return [
        ["  ranks", *(names.ranges(each.ranks) for each in block)],
        ["  layers", *(_layers(each.layers) for each in block)],
        ["  number of parameters", *(format_count(each.rank.parameters) for each in block)],
        *([label, *(_size(each.rank.memory, field) for each in block)] for label, field in SIZES if _is_printed(field, block)),
    ]


def _is_printed(field: str, block: Sequence[_Column]) -> bool:
    """Whether a size has a row: tensors kept between iterations only where there are some."""
    return field != BETWEEN or any(_between_iterations(each.rank.memory) > 0 for each in block)


def _size(memory: RankMemory, field: str) -> str:
    return format_bytes(_between_iterations(memory) if field == BETWEEN else getattr(memory, field))


def _between_iterations(memory: RankMemory) -> int:
    """Bytes allocated between iterations that no other row has."""
    known = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.runtime_bytes
    return memory.allocated_bytes - known


def _layers(layers: tuple[int, ...]) -> str:
    """Numbers of layers, or how many there are if the numbers are too wide for a column."""
    numbers = names.numbers(sorted(set(layers))) or "none"
    return numbers if len(numbers) <= COLUMN else f"{len(set(layers))} from {min(layers)}"


def _peak(rank: RankClass, *, full: bool) -> list[RenderableType]:
    """Where the peak of a rank is; workspaces, caches and temporary tensors by name, under their sums."""
    m = rank.memory
    where = f"Peak of rank {rank.ranks[0][0]}, {format_bytes(m.peak_allocated_bytes)}: {m.peak_at}"
    if m.microbatches_in_flight:
        chunks = " + ".join(map(str, m.microbatches_in_flight))
        where += f"; {chunks} {'microbatch' if chunks == '1' else 'microbatches'} in flight"
    sums = (
        ("workspaces and caches", m.runtime_bytes, m.runtime_parts),
        ("temporary tensors at the peak", m.transient_bytes, m.transient_parts),
    )
    rows: list[tuple[str, str]] = []
    strong: list[int] = []
    for title, total, parts in sums:
        if parts:
            strong.append(len(rows))
            rows.append((title, format_bytes(total)))
            rows.extend((f"  {part.name}", format_bytes(part.bytes)) for part in (parts if full else _largest(parts)))
    lines = [paragraph(f"{where}.")]
    return [*lines, table(("", ""), rows, align="lr", strong=strong)] if rows else lines


def _largest(parts: Sequence[MemoryPart]) -> Iterator[MemoryPart]:
    """The largest parts, and the sum of all others as one part."""
    ordered = sorted(parts, key=lambda part: -abs(part.bytes))
    if len(parts) <= PARTS_SHOWN + 1:
        yield from ordered
        return
    yield from ordered[:PARTS_SHOWN]
    others = ordered[PARTS_SHOWN:]
    yield MemoryPart(name=f"{len(others)} other parts", bytes=sum(part.bytes for part in others))
