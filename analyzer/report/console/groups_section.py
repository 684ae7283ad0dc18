"""Process groups with their members, as names of nodes and GPUs."""

from __future__ import annotations

from analyzer.report.console import names
from analyzer.report.console.text import DIM, INDENT, KEY, Line, line, wrap
from analyzer.results import Report


def group_lists(report: Report, kind: str, *, width: int, whole: bool) -> list[Line]:
    """The groups of one kind: how many, of what size, and who is in them. Empty where every rank is alone in its group.

    Groups may differ in size (the embedding group of a middle stage is empty of others); those of one rank are left out.
    """
    groups = [group for group in report.groups.get(kind, ()) if len(group) > 1]
    if not groups:
        return []
    total = report.group_counts.get(kind, len(groups))
    sizes = sorted({len(group) for group in groups})
    of = " or ".join(f"{size:,}" for size in sizes)
    lines = [line(f"{INDENT}{names.plural(total, 'group')} of {of} GPUs, {names.group(kind)}", KEY)]
    short = not whole and total > names.GROUPS_SHOWN * 2
    cut = total > len(groups)
    for group in groups[: names.GROUPS_SHOWN] if short else groups:
        lines.extend(_members(group, report, width=width, whole=whole))
    if short or cut:
        shown = names.GROUPS_SHOWN if short else len(groups)
        # the list of a large world is cut short, and its last group is then not the last of the world
        left = total - shown - (0 if cut else 1)
        lines.append(line(f"{INDENT * 2}… {left:,} more", DIM))
    if short and not cut:
        lines.extend(_members(groups[-1], report, width=width, whole=whole))
    return lines


def _members(group: tuple[int, ...], report: Report, *, width: int, whole: bool) -> list[Line]:
    text = names.members(group, gpus_per_node=report.job.parallel.gpus_per_node, whole=whole)
    return wrap(text, width=width, first=INDENT * 2, rest=INDENT * 3)
