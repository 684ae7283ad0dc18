"""What is sent: the cluster's totals, and the messages of pipeline, data and tensor parallelism with their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzer.report.console import names
from analyzer.report.console.groups_section import group_lists
from analyzer.report.console.text import DIM, INDENT, KEY, Line, heading, line, table, wrap
from analyzer.results import CommunicationRow, Report
from analyzer.units import format_bytes, format_count, format_shape

MESSAGES_SHOWN = 5
MODULES_SHOWN = 5
STAGES_SHOWN = 8

PIPELINE = ("pp", "embd", "pos_embd")
DATA = ("dp_cp", "dp", "edp", "intra_dp_cp", "inter_dist_opt")
TENSOR = ("tp",)
OTHERS = ("cp", "ep", "etp", "tp_ep")


def summary(report: Report, *, width: int) -> list[Line]:
    """Calls and bytes of one iteration: on the busiest rank of each dimension, and summed over the cluster."""
    totals = report.communication_totals
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
    calls = sum(total.cluster_calls_per_iteration for total in totals.values())
    size = sum(total.cluster_bytes_per_iteration for total in totals.values())
    rows.append(["all", "", "", format_count(calls), format_bytes(size)])
    header = ("", "calls", "bytes", "cluster calls", "cluster bytes")
    lines = heading("Communication of the cluster", width=width)
    if not totals:
        return [*lines, line(f"{INDENT}One GPU sends nothing.")]
    lines.extend(table(header, rows, align="lrrrr", width=width, strong=[len(rows) - 1]))
    note = (
        "In one iteration: of the busiest rank, and of all ranks together. Bytes are the payload handed to a call; "
        "a send and its receive are one message."
    )
    return [*lines, *wrap(note, width=width, first=INDENT, rest=INDENT, style=DIM)]


def pipeline(report: Report, *, width: int, whole: bool) -> list[Line]:
    """Which ranks make up a stage and which layers it holds, what stages send, and the pipeline groups."""
    if report.job.parallel.pipeline == 1:
        return []
    stages = table(("stage", "ranks", "GPUs", "holds"), _stage_rows(report, whole=whole), align="rlll", width=width)
    return [*heading("Pipeline parallelism", width=width), *stages, (), *_section(report, PIPELINE, width=width, whole=whole)]


def data(report: Report, *, width: int, whole: bool) -> list[Line]:
    """How gradients and parameters travel between replicas, and the data-parallel groups."""
    if report.job.parallel.data_with_context == 1:
        return []
    return [*heading("Data parallelism", width=width), *_section(report, DATA, width=width, whole=whole)]


def tensor(report: Report, *, width: int, whole: bool) -> list[Line]:
    """What tensor-parallel ranks send, module by module, and their groups."""
    if report.job.parallel.tensor == 1:
        return []
    return [*heading("Tensor parallelism", width=width), *_section(report, TENSOR, width=width, whole=whole)]


def others(report: Report, *, width: int, whole: bool) -> list[Line]:
    """Context and expert parallelism, where there is any; in full also what crosses several dimensions."""
    sent_over = [message.group for message in report.communication]
    kinds = dict.fromkeys((*OTHERS, *sent_over, *report.groups) if whole else OTHERS)
    rest = [kind for kind in kinds if kind not in (*PIPELINE, *DATA, *TENSOR)]
    body = _section(report, rest, width=width, whole=whole)
    return [*heading("Other groups", width=width), *body] if body else []


def _section(report: Report, kinds: Sequence[str], *, width: int, whole: bool) -> list[Line]:
    """Messages of some kinds of groups, and the groups: those with members of their own, unless `whole`."""
    lines: list[Line] = []
    messages = [message for kind in kinds for message in report.communication if message.group == kind]
    if messages:
        lines.extend([*_messages(messages, width=width, whole=whole), ()])
    for kind in kinds if whole else [kind for kind in kinds if _own(report, kind)]:
        if listed := group_lists(report, kind, width=width, whole=whole):
            lines.extend([*listed, ()])
    return lines[:-1]


def _own(report: Report, kind: str) -> bool:
    """Whether a kind is one that people think in, and its groups are not those of another (edp is dp without experts)."""
    named = (*TENSOR, *PIPELINE, *DATA, *OTHERS)
    groups = report.groups.get(kind)
    return kind in named and not any(report.groups.get(before) == groups for before in named[: named.index(kind)])


def _messages(messages: Sequence[CommunicationRow], *, width: int, whole: bool) -> list[Line]:
    """A line for each kind of message, the largest first, and below it what one rank of each stage sends in an iteration.

    Modules of a stage that send the same are added up, and stages that come out alike stand together.
    """
    kinds: dict[CommunicationRow, dict[int, list[CommunicationRow]]] = {}
    for message in messages:
        kind = replace(message, module="", pipeline_rank=0, calls_per_microbatch=0, calls_per_iteration=0, bytes_per_iteration=0)
        kinds.setdefault(kind, {}).setdefault(message.pipeline_rank, []).append(message)
    largest = sorted(kinds.items(), key=lambda item: -max(map(_bytes, item[1].values())))
    shown = largest if whole else largest[:MESSAGES_SHOWN]
    lines: list[Line] = []
    for kind, by_stage in shown:
        to = f" to the {kind.peer} stage" if kind.peer else ""
        tensor = f"{format_shape(kind.shape)} {kind.dtype}, {format_bytes(kind.message_bytes)} each"
        lines.extend(wrap(f"{kind.phase} {kind.kind}{to}: {tensor}", width=width, first=INDENT, rest=INDENT * 3, style=KEY))
        alike: dict[tuple[int, int, tuple[str, ...]], list[int]] = {}
        for stage, sent in sorted(by_stage.items()):
            calls = sum(m.calls_per_iteration for m in sent)
            alike.setdefault((calls, _bytes(sent), tuple(dict.fromkeys(m.module for m in sent))), []).append(stage)
        for (calls, size, modules), stages in alike.items():
            text = f"{names.stages(stages)}: {names.plural(calls, 'call')}, {format_bytes(size)} an iteration"
            sent_by = _where(modules, whole=whole)
            lines.extend(wrap(f"{text}; {sent_by}" if sent_by else text, width=width, first=INDENT * 2, rest=INDENT * 3))
    if len(shown) < len(kinds):
        most = max(_bytes(sent) for _, by_stage in largest[MESSAGES_SHOWN:] for sent in by_stage.values())
        left = names.plural(len(kinds) - len(shown), "further kind")
        text = f"… and {left} of message, at most {format_bytes(most)} an iteration"
        lines.extend(wrap(text, width=width, first=INDENT, rest=INDENT * 3, style=DIM))
    return lines


def _bytes(sent: Sequence[CommunicationRow]) -> int:
    """What one rank sends of these in an iteration."""
    return sum(message.bytes_per_iteration for message in sent)


def _where(modules: Sequence[str], *, whole: bool) -> str:
    """Modules by the last two names of their paths."""
    short = list(dict.fromkeys(".".join(module.split(".")[-2:]) for module in modules if module))
    if not whole and len(short) > MODULES_SHOWN:
        short = [*short[:MODULES_SHOWN], f"and {len(short) - MODULES_SHOWN} more"]
    return ", ".join(short)


def _stage_rows(report: Report, *, whole: bool) -> list[list[str]]:
    gpus_per_node = report.job.parallel.gpus_per_node
    rows = []
    for rank in report.ranks:
        layers = names.numbers(sorted(layer for chunk in rank.chunks for layer in chunk.layers), whole=whole)
        held = [f"layers {layers}" if layers else "no layers"]
        held += ["embedding"] if any(chunk.pre_process for chunk in rank.chunks) else []
        held += ["output layer and loss"] if any(chunk.post_process for chunk in rank.chunks) else []
        gpus = names.gpu_range(rank.ranks, gpus_per_node=gpus_per_node)
        rows.append([str(rank.pipeline_rank), names.ranges(rank.ranks, whole=whole), gpus, ", ".join(held)])
    if not whole and len(rows) > STAGES_SHOWN:
        rows = [*rows[: STAGES_SHOWN - 2], ["…", "", "", f"{len(rows) - STAGES_SHOWN + 1} more stages"], rows[-1]]
    return rows
