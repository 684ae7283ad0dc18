"""The verdict: whether the launch fits, by how much, and which changes would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.memory.verdict import estimated_range, highest
from analyzer.report.console.elements import BAD, GOOD, KEY, paragraph, table
from analyzer.results import Report, Verdict
from analyzer.units import format_bytes, format_seconds

AN = "AEFHILMNORSX"
"""Letters that are read with a vowel first: an A100, an H100, an RTX."""

if TYPE_CHECKING:
    from rich.console import RenderableType


def verdict(report: Report) -> list[RenderableType]:
    """One sentence with the need of the highest-memory rank, the capacity and the headroom; and the note of the verdict."""
    text, style = sentence(report)
    lines = [paragraph(text, style=style, indent=0)]
    return [*lines, paragraph(report.verdict.note, indent=0)] if report.verdict.note else lines


def one_line(report: Report) -> str:
    """The verdict and the time of an iteration."""
    text, _ = sentence(report)
    return text if report.time is None else f"{text} {format_seconds(report.time.iteration_seconds)} for an iteration."


def sentence(report: Report) -> tuple[str, str]:
    """The verdict and its style."""
    result = report.verdict
    tightest = highest(report.ranks)
    rank = f"rank {result.tightest_rank} (stage {tightest.pipeline_rank})"
    size = format_bytes(report.phases[0].device_bytes if report.phases else tightest.memory.device_bytes)
    needs = f"{rank} needs {size}"
    if result.images_bytes and result.capacity_bytes is not None and result.headroom_bytes is not None:
        rank = f"rank {result.tightest_rank}"
        whole = format_bytes(result.capacity_bytes - result.headroom_bytes)
        needs = f"{rank} needs at most {whole}, of which images need up to {format_bytes(result.images_bytes)},"
    if result.phase and result.capacity_bytes is not None and result.headroom_bytes is not None:
        in_phase = f"in the {result.other_phase} phase, " if result.other_phase else ""
        needs = f"{in_phase}rank {result.tightest_rank} needs {format_bytes(result.capacity_bytes - result.headroom_bytes)}"
    if result.withheld:
        return f"No verdict: {result.withheld}. {_counted(report)}, {rank} needs {size}.", BAD
    if result.fits is None or result.capacity_bytes is None or result.headroom_bytes is None:
        return f"No verdict: the GPU is not known. {rank.capitalize()} needs the most memory, {size}.", KEY
    of = f"of {format_bytes(result.capacity_bytes)}" + (f" ({result.gpu})" if result.gpu else "")
    amount = f"{format_bytes(abs(result.headroom_bytes))} ({share(result.headroom_bytes, of=result.capacity_bytes)})"
    margin = result.margin_bytes or 0
    below = f"the margin of {format_bytes(margin)} ({share(margin, of=result.capacity_bytes)})"
    is_below = 0 <= result.headroom_bytes < margin
    named = [each for each in report.phases if each.name == result.phase]
    least, most = named[0].device_range_bytes if named else estimated_range(report.ranks)
    if result.state == "tight" and most > result.capacity_bytes:
        ends = f"{format_bytes(least)} to {format_bytes(most)}"
        less = f" That is below {below}." if is_below else ""
        return f"It is tight: {needs} {of}; the estimate ranges from {ends}. {left(result)}{less}", KEY
    if result.state == "tight":
        return f"It is tight: {needs} {of}; the headroom of {amount} is below {below}.", KEY
    if result.fits:
        return f"It fits: {needs} {of}; {amount} remain free.", GOOD
    return f"It does not fit: {needs}, and {capacity_of(result)}: {excess(result)}.", BAD


def _counted(report: Report) -> str:
    """What the memory of a report without a verdict is that of."""
    if report.phases:
        return "In the update"
    trained = "adapters beside frozen weights" if report.parameters_adapters else "all parameters"
    return f"Counted as a training of {trained}"


def left(result: Verdict) -> str:
    """What the estimate leaves free or exceeds, where the capacity lies within its range."""
    if result.fits:
        return f"The estimate leaves {format_bytes(result.headroom_bytes or 0)} free, less than its own error."
    return f"The estimate is {format_bytes(-(result.headroom_bytes or 0))} above the capacity, less than its own error."


def excess(result: Verdict) -> str:
    """'363.70 GiB too much (5.6 times the capacity)', or the share of the capacity if it is less than one more capacity."""
    over, capacity = -(result.headroom_bytes or 0), result.capacity_bytes or 1
    ratio = 1 + over / capacity
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"
    what = f"{times} times the capacity" if ratio >= 2 else f"{share(over, of=capacity)} of the capacity"
    return f"{format_bytes(over)} too much ({what})"


def capacity_of(result: Verdict) -> str:
    """'an A100-80GB has 79.15 GiB'."""
    name = f"{'an' if result.gpu[0] in AN else 'a'} {result.gpu}" if result.gpu else "the GPU"
    return f"{name} has {format_bytes(result.capacity_bytes or 0)}"


def share(part: int, *, of: int) -> str:
    """The absolute value of `part` as a percentage."""
    ratio = abs(part) / of
    return f"{ratio:.0%}" if ratio >= 0.01 else "less than 1%"


def advice(report: Report) -> list[RenderableType]:
    """Changes of flags with their savings; nothing for a launch that needs none."""
    if not report.advice or report.verdict.fits:
        return []
    fitting = [each for each in report.advice if each.fits]
    one = "This change would make it fit:" if len(fitting) == 1 else "Each of these changes would make it fit:"
    title = one if fitting else "No single change is enough. These save the most memory; --info-search changes more:"
    rows = [(each.change, format_bytes(each.saves_bytes), format_bytes(each.device_bytes)) for each in report.advice]
    times = [each.iteration_seconds for each in report.advice]
    if None in times:
        return ["", paragraph(title), table(("change", "saves", "then needs"), rows, align="lrr")]
    timed = [(*row, format_seconds(seconds)) for row, seconds in zip(rows, times, strict=True) if seconds is not None]
    return ["", paragraph(title), table(("change", "saves", "then needs", "iteration"), timed, align="lrrr")]
