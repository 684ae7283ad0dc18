"""Communication: totals of the cluster, and the calls of pipeline, data, tensor and other groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.report.console import names
from analyzer.report.console.elements import DIM, INDENT, KEY, heading, paragraph, table
from analyzer.report.console.groups_section import DATA, OTHERS, PIPELINE, TENSOR
from analyzer.results import CommunicationRow, CommunicationTotal, Report
from analyzer.units import format_bytes, format_count, format_shape

if TYPE_CHECKING:
    from rich.console import RenderableType

LARGEST_SHOWN = 2
"""Kinds of groups in the summary line."""


def communication(report: Report) -> list[RenderableType]:
    """Totals, and each kind of call by dimension."""
    lines = [*heading("Communication of the cluster"), *_totals(report)]
    others = dict.fromkeys((*OTHERS, *(row.group for row in report.communication)))
    dimensions = (
        ("Pipeline-parallel communication", PIPELINE),
        ("Data-parallel communication", DATA),
        ("Tensor-parallel communication", TENSOR),
        ("Communication of other groups", [kind for kind in others if kind not in (*PIPELINE, *DATA, *TENSOR)]),
    )
    for title, kinds in dimensions:
        rows = [row for kind in kinds for row in report.communication if row.group == kind]
        if rows:
            lines += [*heading(title), *_calls(rows)]
    return lines


def summary(report: Report) -> str:
    """Calls and bytes of an iteration, and the kinds of groups with the most bytes of one rank."""
    totals = report.communication_totals
    if not totals:
        return "Communication: none."
    calls, size = _sums(list(totals.values()))
    largest = sorted(totals.items(), key=lambda item: -item[1].bytes_per_iteration)[:LARGEST_SHOWN]
    of_rank = ", ".join(f"{names.group(kind)} {format_bytes(total.bytes_per_iteration)}" for kind, total in largest)
    return (
        f"Communication of one iteration: {format_bytes(size)} in {names.plural(calls, 'call')}, summed over all ranks. "
        f"Largest volumes of one rank: {of_rank}."
    )


def _sums(totals: Sequence[CommunicationTotal]) -> tuple[int, int]:
    """Calls and bytes of all ranks."""
    return sum(each.cluster_calls_per_iteration for each in totals), sum(each.cluster_bytes_per_iteration for each in totals)


def _totals(report: Report) -> list[RenderableType]:
    """Calls and bytes of one iteration: on the busiest rank of each dimension, and summed over the cluster."""
    totals = report.communication_totals
    if not totals:
        return [paragraph("One GPU does not communicate.")]
    rows = [
        [
            names.group(kind),
            format_count(total.calls_per_iteration),
            format_bytes(total.bytes_per_iteration),
            format_count(total.cluster_calls_per_iteration),
            format_bytes(total.cluster_bytes_per_iteration),
        ]
        for kind, total in totals.items()
    ]
    calls, size = _sums(list(totals.values()))
    rows.append(["all", "", "", format_count(calls), format_bytes(size)])
    header = ("", "calls", "bytes", "cluster\ncalls", "cluster\nbytes")
    note = (
        "In one iteration: of the busiest rank, and of all ranks together. Bytes are the payload passed to a call; "
        "a send and its receive are counted as one call."
    )
    return [table(header, rows, align="lrrrr", strong=[len(rows) - 1]), paragraph(note, style=DIM)]


def _calls(rows: Sequence[CommunicationRow]) -> list[RenderableType]:
    """Each kind of call, the largest first, and what one rank of each stage sends by it in an iteration.

    Modules of a stage that make the same call are added up, and stages with equal sums are printed together.
    """
    kinds: dict[CommunicationRow, dict[int, list[CommunicationRow]]] = {}
    for row in rows:
        kind = replace(row, module="", pipeline_rank=0, calls_per_microbatch=0, calls_per_iteration=0, bytes_per_iteration=0)
        kinds.setdefault(kind, {}).setdefault(row.pipeline_rank, []).append(row)
    lines: list[RenderableType] = []
    for kind, by_stage in sorted(kinds.items(), key=lambda item: -max(map(_bytes, item[1].values()))):
        to = f" to the {kind.peer} stage" if kind.peer else ""
        tensor = f"{format_shape(kind.shape)} {kind.dtype}, {format_bytes(kind.message_bytes)} per call"
        lines.append(paragraph(f"{kind.phase} {kind.kind}{to}: {tensor}", style=KEY))
        lines.extend(paragraph(text, indent=2 * INDENT) for text in _by_stage(by_stage))
    return lines


def _by_stage(by_stage: dict[int, list[CommunicationRow]]) -> list[str]:
    """Calls, bytes and modules of one kind of call; stages with equal ones together."""
    equal: dict[tuple[int, int, tuple[str, ...]], list[int]] = {}
    for stage, rows in sorted(by_stage.items()):
        calls = sum(row.calls_per_iteration for row in rows)
        equal.setdefault((calls, _bytes(rows), tuple(dict.fromkeys(row.module for row in rows))), []).append(stage)
    texts = []
    for (calls, size, modules), stages in equal.items():
        text = f"{names.stages(stages)}: {names.plural(calls, 'call')}, {format_bytes(size)} per iteration"
        short = dict.fromkeys(".".join(module.split(".")[-2:]) for module in modules if module)
        texts.append(f"{text}; {', '.join(short)}" if short else text)
    return texts


def _bytes(rows: Sequence[CommunicationRow]) -> int:
    """Bytes that one rank sends by these calls in an iteration."""
    return sum(row.bytes_per_iteration for row in rows)
