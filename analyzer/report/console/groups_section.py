"""Pipeline stages, and process groups with their members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from analyzer.report.console import names
from analyzer.report.console.elements import DIM, INDENT, KEY, heading, paragraph, table
from analyzer.results import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPELINE = ("pp", "embd", "pos_embd")
DATA = ("dp_cp", "dp", "edp", "intra_dp_cp", "inter_dist_opt")
TENSOR = ("tp",)
OTHERS = ("cp", "ep", "etp", "tp_ep")


def groups(report: Report) -> list[RenderableType]:
    """The ranks and layers of each stage, and the members of all process groups of more than one rank."""
    lines = heading("Process groups")
    if report.job.parallel.pipeline > 1:
        lines += [_stages(report), ""]
    known: dict[tuple[Sequence[int], ...], str] = {}
    for kind in dict.fromkeys((*PIPELINE, *DATA, *TENSOR, *OTHERS, *report.groups)):
        if lists := list(_groups(report, kind, known=known)):
            lines += [*lists, ""]
    if len(lines) == 2:
        lines += [paragraph("One GPU has no process groups."), ""]
    return lines[:-1]


def summary(report: Report) -> str:
    """The number and size of the groups of each dimension."""
    parts = [_counted(report, kind) for kind in (*TENSOR, *PIPELINE, *DATA, *OTHERS) if _is_distinct(report, kind)]
    return f"Process groups: {'; '.join(part for part in parts if part) or 'none'}."


def _is_distinct(report: Report, kind: str) -> bool:
    """Whether no kind before it has the same groups: edp has those of dp in a model without experts."""
    kinds = (*TENSOR, *PIPELINE, *DATA, *OTHERS)
    found = report.groups.get(kind)
    return not any(report.groups.get(before) == found for before in kinds[: kinds.index(kind)])


def _counted(report: Report, kind: str) -> str:
    """'4 groups of 2 GPUs, tensor (tp)'; empty where every rank is alone in its group.

    Groups of one kind can differ in size. Those of one rank are not counted.
    """
    found = [group for group in report.groups.get(kind, ()) if len(group) > 1]
    if not found:
        return ""
    sizes = " or ".join(f"{size:,}" for size in sorted({len(group) for group in found}))
    return f"{names.plural(report.group_counts.get(kind, len(found)), 'group')} of {sizes} GPUs, {names.group(kind)}"


def _groups(report: Report, kind: str, *, known: dict[tuple[Sequence[int], ...], str]) -> Iterator[RenderableType]:
    """The groups of one kind; `known` collects the kinds by their groups, so that equal groups are printed once."""
    title = _counted(report, kind)
    if not title:
        return
    first = known.setdefault(report.groups[kind], kind)
    if first != kind:
        yield paragraph(f"{title}: the same groups as {names.group(first)}", style=KEY)
        return
    yield paragraph(title, style=KEY)
    found = [group for group in report.groups[kind] if len(group) > 1]
    for group in found:
        yield paragraph(names.members(group, gpus_per_node=report.job.parallel.gpus_per_node), indent=2 * INDENT)
    left = report.group_counts.get(kind, len(found)) - len(found)
    if left > 0:
        yield paragraph(f"… {left:,} more, which this analysis does not list for so many GPUs", style=DIM, indent=2 * INDENT)


def _stages(report: Report) -> RenderableType:
    """A row for each rank class: its stage, ranks, GPUs and part of the model."""
    rows = []
    for rank in report.ranks:
        layers = names.numbers(sorted(layer for chunk in rank.chunks for layer in chunk.layers), full=True)
        parts = [f"layers {layers}" if layers else "no layers"]
        parts += ["embedding"] if any(chunk.pre_process for chunk in rank.chunks) else []
        parts += ["output layer and loss"] if any(chunk.post_process for chunk in rank.chunks) else []
        gpus = names.gpu_range(rank.ranks, gpus_per_node=report.job.parallel.gpus_per_node)
        rows.append([str(rank.pipeline_rank), names.ranges(rank.ranks, full=True), gpus, ", ".join(parts)])
    return table(("stage", "ranks", "GPUs", "part of the model"), rows, align="rlll", wrapped=(1, 3))
