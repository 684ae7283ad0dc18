"""The result of a search: the fastest layouts, why the first one is faster than the launch, memory against time, and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TextIO

from rich.text import Text

from analyzer.launch.argv_parser import options_with_values
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.options import as_short_text, as_text
from analyzer.layout_search.related import Limit, Question
from analyzer.layout_search.result import SearchResult, distinct_front
from analyzer.report.console.elements import heading, paragraph, table
from analyzer.report.console.report import write
from analyzer.report.console.time_section import PARTS
from analyzer.results import Report
from analyzer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH: Final = 100
"""Characters of a line with options."""
SMALLEST: Final = 0.005
"""Differences of parts below this share of an iteration are not printed."""
ABBREVIATIONS: Final = {
    "VPP": "virtual stages of each pipeline rank",
    "ETP": "tensor parallelism of the experts",
    "MBS": "micro-batch size",
    "first": "layers of the first stage",
    "last": "layers of the last stage",
}
"""Abbreviations of changed options that are explained, in this order."""
OF_UPDATE: Final = "The memory of a layout is that of the update; other phases are counted for your launch only."
AS_GIVEN: Final = "your launch"


def print_search(result: SearchResult, report: Report, *, stream: TextIO) -> None:
    """Prints the result of one search. `report` is that of the launch."""
    write(lambda width: sections(result, report, width=width), stream=stream)


def sections(result: SearchResult, report: Report, *, width: int) -> list[RenderableType]:
    """The parts of the result, in order."""
    capacity = report.verdict.capacity_bytes or 0
    found = [*heading("Search"), paragraph(_launch(report)), paragraph(_extent(result))]
    if report.phases:
        found.append(paragraph(OF_UPDATE))
    if not result.best:
        return [*found, paragraph("No layout fits." if result.complete else "No layout that fits was found.")]
    rows = [_row(_mark(place, each, result), each, capacity) for place, each in enumerate(result.best, 1)]
    columns = ("", "iteration", "tokens/s/GPU", "MFU", "memory", "free", "changed options")
    return [
        *found,
        "",
        table(columns, rows, align="rrrrrrl", wrapped=(6,)),
        "",
        *_key(rows),
        *_equal(result),
        paragraph(_place(result, report)),
        *_reasons(result),
        *_front(result, capacity),
        *_commands(result.commands, result.best, width),
    ]


def _mark(place: int, each: Evaluation, result: SearchResult) -> str:
    """The place, with a mark if the layout equals the first. Other places have blanks if there is a mark at all."""
    equal = sum(map(result.equals_first, result.best)) > 1
    return f"{place}{' =' if place > 1 and result.equals_first(each) else '  ' if equal else ''}"


def _key(rows: Sequence[Sequence[str]]) -> list[RenderableType]:
    """The meaning of the abbreviations in the last column."""
    used = {word for row in rows for word in re.findall(r"\w+", row[-1])}
    meanings = [f"{word}: {meaning}" for word, meaning in ABBREVIATIONS.items() if word in used]
    return [paragraph(f"{'; '.join(meanings)}.")] if meanings else []


def _equal(result: SearchResult) -> list[RenderableType]:
    """What the mark means, if there is one."""
    if not any(map(result.equals_first, result.best[1:])):
        return []
    return [paragraph(f"=: equal to the first, within the error of the times ({result.error:.0%}).")]


def _row(place: str, each: Evaluation, capacity: int) -> tuple[str, ...]:
    free = format_bytes(capacity - each.device_bytes) + (" (tight)" if each.tight else "")
    return (
        place,
        format_seconds(each.iteration_seconds),
        f"{each.tokens_per_second_per_gpu:,.0f}",
        f"{each.model_flops_utilization:.1%}",
        format_bytes(each.device_bytes),
        free,
        as_short_text(each.options) or AS_GIVEN,
    )


def _launch(report: Report) -> str:
    time = "" if report.time is None else f", {format_seconds(report.time.iteration_seconds)} for an iteration"
    return f"Your launch: {report.verdict.state or 'no verdict'} on {report.verdict.gpu or 'the GPU'}{time}."


def _extent(result: SearchResult) -> str:
    if not result.complete:
        ended = f"The search ended early ({result.ended}), after {format_seconds(result.seconds)}"
        bound = f"a layout can be up to {result.gap:.0%} faster" if result.best else "there may be a layout that fits"
        return f"{ended}: {result.evaluated:,} of {result.candidates:,} layouts were calculated, and {bound}."
    text = f"{result.candidates:,} layouts in {format_seconds(result.seconds)}"
    if result.evaluated >= result.candidates:
        return f"{text}: all were calculated."
    if result.aim == "fastest":
        more = "Layouts 2 and later may not be the next ones; --info-search-thorough finds these."
        return f"{text}: {result.evaluated:,} were calculated; the others cannot fit or cannot be faster than layout 1. {more}"
    return f"{text}: {result.evaluated:,} were calculated; the others cannot fit or cannot be faster."


def _place(result: SearchResult, report: Report) -> str:
    if result.given is None:
        change = result.smallest_change
        text = "Your launch does not fit."
        if report.verdict.fits:
            text = "Your launch fits only if PyTorch frees unused segments, and a search leaves out such layouts."
        if change is None:
            return text
        needed = f"{format_bytes(change.device_bytes)}, {format_seconds(change.iteration_seconds)} for an iteration"
        return f"{text} The smallest change that fits: {as_text(change.options)} ({needed})."
    if not result.complete:
        return f"Your launch takes {format_seconds(result.given.iteration_seconds)}."
    faster = result.given.iteration_seconds / result.best[0].iteration_seconds - 1
    compared = f"takes {faster:.1%} longer than layout 1" if faster >= SMALLEST else "is about as fast as layout 1"
    if result.place is None:
        return f"Your launch {compared}."
    return f"Your launch has place {result.place}: it {compared}."


def _reasons(result: SearchResult) -> list[RenderableType]:
    """Which parts of the time got smaller, in the order of their size."""
    if result.given is None or result.given.iteration_seconds <= result.best[0].iteration_seconds:
        return []
    before, after = result.given.parts_seconds, result.best[0].parts_seconds
    least = SMALLEST * result.given.iteration_seconds
    changes = sorted((after[part] - before[part], name) for part, name in PARTS.items() if abs(after[part] - before[part]) >= least)
    less = [f"{name} {format_seconds(-change)} less" for change, name in changes if change < 0]
    more = [f"{name} {format_seconds(change)} more" for change, name in reversed(changes) if change > 0]
    return [paragraph(f"Why the first is faster: {', '.join((*less, *more))}.")] if less else []


def _front(result: SearchResult, capacity: int) -> list[RenderableType]:
    rows = [_row("", each, capacity)[1:] for each in distinct_front(result)]
    if len(rows) < 2:
        return []
    title = "Best trade-offs of memory and time"
    columns = ("iteration", "tokens/s/GPU", "MFU", "memory", "free", "changed options")
    return [*heading(title), table(columns, rows, align="rrrrrl", wrapped=(5,))]


def _commands(commands: Sequence[str], best: Sequence[Evaluation], width: int) -> list[RenderableType]:
    found: list[RenderableType] = [*heading("Commands of the first layouts")] if commands else []
    for place, command in enumerate(commands, 1):
        found += [
            "",
            f"  # layout {place}{_of_layout(best[place - 1 : place])}",
            Text(continued(command, width), no_wrap=True, overflow="ignore"),
        ]
    return found


def _of_layout(found: Sequence[Evaluation]) -> str:
    """Time and memory of a layout, in brackets."""
    return "".join(f" ({format_seconds(each.iteration_seconds)}, {format_bytes(each.device_bytes)})" for each in found)


def continued(command: str, width: int) -> str:
    """A command in lines that a shell reads as one. No line ends between an option and its values, unless they are too long."""
    lines = [""]
    groups = options_with_values(shlex.split(command))
    parts = [
        part
        for group in groups
        for part in ([group] if _is_option(group) and len(shlex.join(group)) <= width else [[word] for word in group])
    ]
    for text in map(shlex.join, parts):
        if lines[-1] and len(lines[-1]) + len(text) + 3 > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return " \\\n".join(lines)


def _is_option(group: Sequence[str]) -> bool:
    """Whether the words are an option with its values. An option with = has no others."""
    return group[0].startswith("-") and "=" not in group[0]


def print_questions(questions: Sequence[Question], *, stream: TextIO) -> None:
    """Prints a line for each GPU and number of GPUs, with the fastest layout."""
    write(lambda _: _questions(questions), stream=stream)


def _questions(questions: Sequence[Question]) -> list[RenderableType]:
    priced = any(each.training is not None and each.training.cost is not None for each in questions)
    trained = any(each.training is not None for each in questions)
    header: tuple[str, ...] = ("GPU", "GPUs", "iteration", "tokens/s", "MFU", "memory")
    header += (("days", "GPU-hours") if trained else ()) + (("cost",) if priced else ()) + ("changed options",)
    rows = [_question(each, trained=trained, priced=priced) for each in questions]
    align = "l" + "r" * (len(header) - 2) + "l"
    columns = (len(header) - 1,)
    return [*heading("Fastest layouts that fit"), table(header, rows, align=align, wrapped=columns), *_changes(questions)]


def _changes(questions: Sequence[Question]) -> list[RenderableType]:
    """The changed options of each row, to paste."""
    found: list[RenderableType] = []
    for each in questions:
        if each.result.best and each.result.best[0].options:
            found += ["", f"  # {each.gpus:,} {each.gpu}", *changed_options(each.result.best[0].options)]
    return ["", paragraph("Options of each row:"), *found] if found else []


def changed_options(options: dict[str, object]) -> list[RenderableType]:
    """Options of a layout in lines to paste, and those of the launch to leave out."""
    removed = [flag for flag, value in options.items() if value is None or value is False]
    added = as_text({flag: value for flag, value in options.items() if flag not in removed})
    found: list[RenderableType] = [Text(continued(added, WIDTH), no_wrap=True, overflow="ignore")] if added else []
    return [*found, *([paragraph(f"Leave out {', '.join(removed)}.")] if removed else [])]


def _question(question: Question, *, trained: bool, priced: bool) -> tuple[str, ...]:
    count = 4 + 2 * trained + priced
    early = "" if question.result.complete else f" (the search ended early: {question.result.ended})"
    if not question.result.best:
        none = "no layout was found" if early else "no layout fits"
        return (question.gpu, f"{question.gpus:,}", *("",) * count, none + early)
    best, training = question.result.best[0], question.training
    cells = [
        format_seconds(best.iteration_seconds),
        f"{best.tokens_per_second_per_gpu * question.gpus:,.0f}",
        f"{best.model_flops_utilization:.1%}",
        format_bytes(best.device_bytes) + (" (tight)" if best.tight else ""),
    ]
    if trained:
        cells += ["", ""] if training is None else [f"{training.days:,.1f}", f"{training.gpu_hours:,.0f}"]
    if priced:
        cells.append("" if training is None or training.cost is None else f"{training.cost:,.0f}")
    return (question.gpu, f"{question.gpus:,}", *cells, (as_short_text(best.options) or AS_GIVEN) + early)


def print_limit(limit: Limit, capacity: int, *, flag: str, phases: bool, stream: TextIO) -> None:
    """Prints the largest value of an option with which the launch fits.

    `flag`: the option as the launch spells it. `phases`: the launch has phases beside the update.
    """
    text = _limit(limit, capacity, flag)
    if phases:
        text += " The memory is that of the update; other phases are not counted here."
    write(lambda _: [*heading(f"Largest {flag}"), paragraph(text)], stream=stream)


def _limit(limit: Limit, capacity: int, flag: str) -> str:
    if limit.value is None or limit.device_bytes is None:
        return f"The launch does not fit with any {flag}."
    needed = f"{format_bytes(limit.device_bytes)} of {format_bytes(capacity)}{', which is tight' if limit.tight else ''}"
    text = f"With this layout {limit.value:,} is the largest {flag} that fits: {needed}."
    if limit.option == "seq-length":
        text += f" Raise --max-position-embeddings to it as well. Multiples of {limit.step:,} tokens were tried."
    others = "Other layouts may allow more: add --info-search."
    if limit.next_value is None or limit.next_bytes is None:
        return f"{text} A larger one cannot be split over the ranks. {others}"
    return f"{text} With {limit.next_value:,} the launch needs {format_bytes(limit.next_bytes)}. {others}"
