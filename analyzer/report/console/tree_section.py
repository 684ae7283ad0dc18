"""The trees of the model: without parallelism, and of each stage as on one rank with its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Collective, Module
from analyzer.report import tree_sums
from analyzer.report.console import names
from analyzer.report.console.elements import KEY, heading, paragraph, table
from analyzer.report.console.tree_view import Figure, tree_view
from analyzer.results import RankClass, Report
from analyzer.units import format_bytes, format_count, format_shape

if TYPE_CHECKING:
    from rich.console import RenderableType

PHASES = ("forward", "backward", "recompute", "gradient", "parameter")


def trees(report: Report, *, width: int) -> list[RenderableType]:
    """The full model, and the layers of each stage."""
    return [*_full_model(report, width=width), *_rank_trees(report, width=width)]


def _full_model(report: Report, *, width: int) -> list[RenderableType]:
    """The model without parallelism: layers, shapes, parameters, and what one microbatch saves for backward."""
    counts = [("parameters", report.parameters)]
    if report.parameters_unpadded != report.parameters:
        counts.append(("  without vocabulary padding", report.parameters_unpadded))
    if report.parameters_active != report.parameters:
        counts.append(("  active per token", report.parameters_active))
    if report.parameters_routed_experts:
        counts.append(("  of routed experts", report.parameters_routed_experts))
    rows = [(name, format_count(n)) for name, n in counts]
    return [
        *heading("Full model without parallelism"),
        tree_view(report.full_model, figures=_FIGURES, notes=_shapes, width=width),
        "",
        table(("", ""), rows, align="lr"),
    ]


def _rank_trees(report: Report, *, width: int) -> list[RenderableType]:
    """The layers of each stage as on one rank, with forward and backward collectives.

    Activations are what one microbatch saves for backward. Modules that equal one printed before are not printed again.
    """
    stages = {rank.pipeline_rank: rank for rank in reversed(report.ranks)}  # ranks of a stage may differ in memory
    lines = heading("Layers on one rank and their collectives")
    known: list[Module] = []
    for stage in sorted(stages):
        rank = stages[stage]
        for chunk, tree in zip(rank.chunks, rank.trees, strict=True):
            lines.append(paragraph(_title(rank, chunk), style=KEY))
            lines.append(tree_view(tree, figures=_FIGURES, notes=_shapes_and_collectives, width=width, known=known))
            lines.append("")
            known.extend(module for _, module in tree.walk() if module.children and module not in known)
    return lines[:-1]


def _title(rank: RankClass, chunk: Chunk) -> str:
    parts = [f"stage {rank.pipeline_rank}"]
    if len(rank.chunks) > 1:
        parts.append(f"virtual stage {chunk.virtual_stage}")
    parts.append(f"layers {names.numbers(chunk.layers)}" if chunk.layers else "no layers")
    return ", ".join(parts)


def _shapes(module: Module) -> tuple[str, ...]:
    return (", ".join(f"{p.name}{format_shape(p.shape)}" for p in module.parameters),) if module.parameters else ()


def _shapes_and_collectives(module: Module) -> tuple[str, ...]:
    return (*_shapes(module), *map(_collective, sorted(module.collectives, key=lambda c: PHASES.index(c.phase))))


def _collective(c: Collective) -> str:
    times = f"{c.count} × " if c.count > 1 else ""
    return f"{c.phase}: {times}{c.group} {c.kind} {format_shape(c.shape)} {c.dtype} {format_bytes(c.message_bytes)}"


_FIGURES = (
    Figure("parameters", lambda module: format_count(n) if (n := tree_sums.parameters(module)) else ""),
    Figure("activations", lambda module: format_bytes(n) if (n := module.retained_bytes) else ""),
)
