"""The answers to questions over all layouts: the smallest number of GPUs, the longest sequence, the largest micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TextIO

from analyzer.layout_search.extremes import Extreme
from analyzer.layout_search.options import as_short_text
from analyzer.report.console.elements import fields, heading, paragraph
from analyzer.report.console.report import write
from analyzer.report.console.search_section import changed_options
from analyzer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES: Final = {
    "gpus": "Smallest number of GPUs",
    "seq-length": "Longest sequence",
    "micro-batch-size": "Largest micro-batch",
}


def print_extremes(extremes: Sequence[tuple[str, Extreme]], *, days: float | None, stream: TextIO) -> None:
    """Prints an answer for each GPU. `days`: the limit of the training."""
    write(lambda _: [part for gpu, extreme in extremes for part in _section(gpu, extreme, days)], stream=stream)


def _section(gpu: str, extreme: Extreme, days: float | None) -> list[RenderableType]:
    found = heading(f"{TITLES[extreme.what]} ({gpu})")
    layout = extreme.layout
    if extreme.value is None or layout is None:
        return [*found, paragraph(_nothing(extreme, days))]
    rows = [
        ("layout", as_short_text(layout.options) or "the launch as it is"),
        ("memory", f"{format_bytes(layout.device_bytes)}{' (tight)' if layout.tight else ''}"),
        ("iteration", f"{format_seconds(layout.iteration_seconds)}, MFU {layout.model_flops_utilization:.1%}"),
    ]
    if extreme.training is not None:
        cost = "" if extreme.training.cost is None else f", {extreme.training.cost:,.0f} in all"
        rows.append(("training", f"{extreme.training.days:,.1f} days, {extreme.training.gpu_hours:,.0f} GPU-hours{cost}"))
    options = {**extreme.options, **layout.options}
    shown = ["", paragraph("Options:"), *changed_options(options)] if options else []
    return [*found, paragraph(_answer(gpu, extreme, days)), "", fields(rows), *shown]


def _answer(gpu: str, extreme: Extreme, days: float | None) -> str:
    value, other = extreme.value, extreme.not_enough
    if extreme.what == "gpus":
        wanted = "" if days is None else f" within {days:g} days"
        reason = "no layout fits" if days is None else "no layout fits, or none is fast enough"
        less = "" if other is None else f" On {other:,}, {reason}."
        return f"{value:,} {gpu} are the fewest with which the launch fits{wanted}.{less}"
    more = "" if other is None else f" With {other:,}, no layout fits or is accepted by Megatron-LM."
    unit = (
        f"tokens: the longest sequence{_of_encoder(extreme)}"
        if extreme.what == "seq-length"
        else "sequences: the largest micro-batch"
    )
    return f"{value:,} {unit} with which a layout fits on {extreme.gpus:,} {gpu}.{more} The fastest layout with it:"


def _of_encoder(extreme: Extreme) -> str:
    return " of the encoder" if "--encoder-seq-length" in extreme.options else ""


def _nothing(extreme: Extreme, days: float | None) -> str:
    if extreme.what == "gpus":
        limit = "" if days is None else f" or takes at most {days:g} days"
        return f"No layout on up to {extreme.gpus:,} GPUs fits{limit}."
    smallest = "" if extreme.not_enough is None else f", even with {extreme.not_enough:,}"
    return f"No layout on {extreme.gpus:,} GPUs fits{smallest}."
