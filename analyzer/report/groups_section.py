"""Process groups with their members, as names of nodes and GPUs."""

from __future__ import annotations

from analyzer.report import names
from analyzer.report.text import DIM, INDENT, KEY, Line, line, wrap
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
    shown = groups if whole or len(groups) <= names.GROUPS_SHOWN * 2 else [*groups[: names.GROUPS_SHOWN], groups[-1]]
    for group in shown:
        if group is shown[-1] and len(shown) < len(groups):
            lines.append(line(f"{INDENT * 2}… {total - len(shown):,} more", DIM))
        text = names.members(group, gpus_per_node=report.launch.parallel.gpus_per_node, whole=whole)
        lines.extend(wrap(text, width=width, first=INDENT * 2, rest=INDENT * 3))
    if whole and report.groups_truncated and total > len(groups):
        lines.append(line(f"{INDENT * 2}… {total - len(groups):,} more", DIM))
    return lines
