"""The trees of the model: whole as if on one GPU, and as ranks hold it with what they send."""

from __future__ import annotations

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Collective, Module
from analyzer.report import tree_sums as folds
from analyzer.report.console import names
from analyzer.report.console.text import INDENT, KEY, Line, heading, line, table
from analyzer.report.console.tree_view import Figure, Note, tree_view
from analyzer.results import RankClass, Report
from analyzer.units import format_bytes, format_count, format_shape

PHASES = ("forward", "backward", "recompute", "gradient", "parameter")


def full_model(report: Report, *, width: int, whole: bool) -> list[Line]:
    """The model without parallelism: layers, shapes, parameters, and what one microbatch keeps for backward."""
    counts = [("parameters", report.parameters)]
    if report.parameters_unpadded != report.parameters:
        counts.append(("  without padding of the vocabulary", report.parameters_unpadded))
    if report.parameters_active != report.parameters:
        counts.append(("  active for a token", report.parameters_active))
    if report.parameters_routed_experts:
        counts.append(("  of routed experts", report.parameters_routed_experts))
    rows = [(name, format_count(n)) for name, n in counts]
    return [
        *heading("Full model without parallelism", width=width),
        *tree_view(report.full_model, figures=_FIGURES, notes=[_SHAPES], width=width, whole=whole),
        (),
        *table(("", ""), rows, align="lr", width=width)[1:],
    ]


def rank_trees(report: Report, *, width: int, whole: bool) -> list[Line]:
    """The layers of each stage as a rank holds them, with forward and backward collectives.

    Activations are what one microbatch keeps for backward. Shortened, it is the first chunk of the first stage and the
    last chunk of the last: those between hold no kind of module that these do not.
    """
    stages = {rank.pipeline_rank: rank for rank in reversed(report.ranks)}  # ranks of a stage may differ in memory
    held = [stages[number] for number in sorted(stages)]
    picked = [(rank, chunk, tree) for rank in held for chunk, tree in zip(rank.chunks, rank.trees, strict=True)]
    if not whole and len(picked) > 2:
        picked = [picked[0], picked[-1]]
    lines = heading("Layers on one rank and what they send", width=width)
    notes = [_SHAPES, _COLLECTIVES]
    known: list[Module] = []
    for rank, chunk, tree in picked:
        lines.append(line(INDENT + _title(rank, chunk), KEY))
        lines.extend(tree_view(tree, figures=_FIGURES, notes=notes, width=width, whole=whole, known=known))
        lines.append(())
        if not whole:
            known.extend(module for _, module in tree.walk() if module.children)
    return lines[:-1]


def _title(rank: RankClass, chunk: Chunk) -> str:
    parts = [f"stage {rank.pipeline_rank}"]
    if len(rank.chunks) > 1:
        parts.append(f"virtual stage {chunk.virtual_stage}")
    parts.append(f"layers {names.numbers(chunk.layers)}" if chunk.layers else "no layers")
    return ", ".join(parts)


def _shapes(module: Module) -> tuple[str, ...]:
    return (", ".join(f"{p.name}{format_shape(p.shape)}" for p in module.parameters),) if module.parameters else ()


def _collectives(module: Module) -> tuple[str, ...]:
    return tuple(map(_collective, sorted(module.collectives, key=lambda c: PHASES.index(c.phase))))


def _collective(c: Collective) -> str:
    times = f"{c.count} × " if c.count > 1 else ""
    return f"{c.phase}: {times}{c.group} {c.kind} {format_shape(c.shape)} {c.dtype} {format_bytes(c.message_bytes)}"


_FIGURES = (
    Figure("parameters", lambda module: format_count(n) if (n := folds.parameters(module)) else ""),
    Figure("activations", lambda module: format_bytes(n) if (n := folds.saved_bytes(module)) else ""),
)
_SHAPES = Note("shape", _shapes)
_COLLECTIVES = Note("collectives", _collectives)
