"""What the page says without JavaScript: the verdict, the launch with its key figures, changes of options, the gain of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.layout_search.options import as_short_text
from analyzer.memory.verdict import highest
from analyzer.report.console import inference_section, offload_section, serving_section, summary_section, verdict_section
from analyzer.units import format_bytes, format_count, format_seconds
from analyzer.version import __version__

if TYPE_CHECKING:
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport, ServedTime
    from analyzer.layout_search.result import SearchResult
    from analyzer.results import Report, Verdict

Row = tuple[str, str]
ORDER: Final = ("model", "parameters", "layout", "batch", "tokens", "iteration", "training")
"""The first rows of the launch."""
STATES: Final = {"fits": "fits", "does not fit": "fails", "tight": "tight"}
"""The class of a verdict in the style sheet."""


class Gain(NamedTuple):
    """What a search has found."""

    text: str
    command: str
    """The launch with the changed options; empty if no layout is faster."""


class Changes(NamedTuple):
    """A table of changes of options."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Head:
    """The part of the page that is text."""

    title: str
    verdict: str
    note: str
    state: str
    """The class of the verdict in the style sheet; empty without a verdict."""
    facts: tuple[Row, ...]
    """The launch, and how it was analyzed."""
    cards: tuple[Row, ...]
    """Key figures."""
    changes: Changes | None = None
    gain: Gain | None = None


def head_of_training(report: Report, *, name: str, search: SearchResult | None = None) -> Head:
    """The head of the report of a training. `name`: the model, if the launch names it."""
    text, _ = verdict_section.sentence(report)
    facts = [row for row in summary_section.key_rows(report) if row[0] not in ("faster", "GPU capacity", "headroom")]
    training = None if report.time is None else report.time.training
    if training is not None:
        facts.append(("tokens", f"{training.tokens:,} in {training.iterations:,} iterations"))
    return Head(
        title=_title(name, report),
        verdict=text,
        note=report.verdict.note,
        state=_state(report.verdict),
        facts=_facts(name, facts),
        cards=_cards(report),
        changes=_changes(report),
        gain=None if search is None else gain_of(search),
    )


def head_of_inference(report: InferenceReport, *, name: str) -> Head:
    """The head of the report of generation."""
    text, _ = inference_section.verdict(report)
    highest_rank, job = report.highest, report.job
    cards = [
        ("GPUs", f"{job.parallel.world_size:,}"),
        ("Memory of the highest-memory rank", format_bytes(highest_rank.device_bytes)),
    ]
    cards += _gpu_cards(report.verdict)
    if report.limits is not None:
        cards.append(("Largest batch", format_count(report.limits.batch_size) if report.limits.batch_size else "none fits"))
    if report.time is not None:
        given = report.time.given
        cards.append(("Time to the first token", format_seconds(given.prefill.total)))
        cards.append(("Time of an output token", format_seconds(given.decode.total)))
        cards.append(("Tokens/s", f"{given.tokens_per_second:,.0f}"))
        if given.cost_per_million_tokens is not None:
            cards.append(("Cost of a million tokens", f"{given.cost_per_million_tokens:,.2f}"))
    facts = [row for row in inference_section.key_rows(report) if row[0] not in ("GPU capacity", "headroom")]
    if report.serving is not None:
        cards += _serving_cards(report.serving.given)
        facts += serving_section.key_rows(report.serving)
    return Head(
        title=_title(name, report),
        verdict=text,
        note=report.verdict.note,
        state=_state(report.verdict),
        facts=_facts(name, facts),
        cards=(*cards, ("Parameters", _billions(report.parameters))),
    )


def _serving_cards(given: ServedTime) -> list[Row]:
    """Key figures of the number of clients of the launch."""
    cards = [
        ("Clients of a replica", f"{given.clients:,}"),
        ("Time to the first token", format_seconds(given.first_seconds)),
        ("Time of an output token", format_seconds(given.token_seconds)),
        ("Tokens/s", f"{given.tokens_per_second:,.0f}"),
    ]
    if given.cost_per_million_tokens is not None:
        cards.append(("Cost of a million tokens", f"{given.cost_per_million_tokens:,.2f}"))
    return cards


def head_of_offload(report: OffloadReport, *, name: str) -> Head:
    """The head of the report of generation with offloading."""
    text, _ = offload_section.verdict(report)
    cards = [(f"Memory of {tier.name}", format_bytes(int(tier.total))) for tier in report.tiers if tier.total]
    cards.append(("Tokens/s", f"{report.tokens_per_second:,.3g}"))
    cards.append(("Latency of a block", format_seconds(report.seconds.total)))
    return Head(
        title=_title(name, report),
        verdict=text,
        note=report.verdict.note,
        state=_state(report.verdict),
        facts=_facts(name, offload_section.key_rows(report)),
        cards=(*cards, ("Parameters", _billions(report.parameters))),
    )


def gain_of(search: SearchResult) -> Gain:
    """What the fastest layout of a search saves, and its command."""
    end = "" if search.complete else " The search ended before all layouts were tried."
    if not search.best:
        return Gain(f"No layout {'fits' if search.complete else 'that fits was found'}.", "")
    best, given = search.best[0], search.given
    command = search.commands[0] if search.commands else ""
    what = as_short_text(best.options) or "the launch as it is"
    found = f"{format_seconds(best.iteration_seconds)} for an iteration and {format_bytes(best.device_bytes)} with {what}"
    if given is None:
        return Gain(f"The launch does not fit. The fastest layout that fits takes {found}.{end}", command)
    if not best.options:
        return Gain(f"No layout that was found is faster than the launch.{end}", "")
    if search.equals_first(given):
        return Gain(f"No layout is faster than the launch by more than the error of the times ({search.error:.0%}).{end}", "")
    share = 1 - best.iteration_seconds / given.iteration_seconds
    than = f"{share:.1%} less time than the launch, which takes {format_seconds(given.iteration_seconds)}"
    return Gain(f"The fastest layout that fits takes {found}: {than}.{end}", command)


def written_now() -> str:
    """The time of writing, in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _facts(name: str, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, the model with its name, and the version of the program."""
    named = [(label, f"{name}: {value}" if label == "model" and name else value) for label, value in rows]
    named.sort(key=lambda row: ORDER.index(row[0]) if row[0] in ORDER else len(ORDER))
    return (*named, ("report", f"get-training-info {__version__}, {written_now()}"))


def _title(name: str, report: Report | InferenceReport | OffloadReport) -> str:
    """The model, by its size if it has no name, and the GPUs."""
    model = report.job.model
    size = f"{_billions(report.parameters)} parameters ({model.num_layers} layers × {model.hidden_size:,})"
    return f"{name or size} on {report.job.parallel.world_size:,} × {report.verdict.gpu or 'GPU'}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.1f} billion" if parameters >= 1e8 else f"{parameters / 1e6:,.1f} million"


def _state(verdict: Verdict) -> str:
    if verdict.withheld:
        return "fails"
    return "" if verdict.fits is None else STATES.get(verdict.state or "", "")


def _gpu_cards(verdict: Verdict) -> list[Row]:
    if verdict.capacity_bytes is None:
        return []
    cards = [(f"Memory of {verdict.gpu or 'the GPU'}", format_bytes(verdict.capacity_bytes))]
    if verdict.headroom_bytes is not None and verdict.headroom_bytes >= 0:
        return [*cards, ("Headroom", format_bytes(verdict.headroom_bytes))]
    return [*cards, ("Too much", format_bytes(-(verdict.headroom_bytes or 0)))]


def _phase_cards(report: Report) -> list[Row]:
    """The phase that the verdict is on, if that is not the update."""
    name = report.verdict.other_phase
    return [(f"Memory in the {name} phase", format_bytes(each.device_bytes)) for each in report.phases if each.name == name]


def _cards(report: Report) -> tuple[Row, ...]:
    cards = [
        ("GPUs", f"{report.job.parallel.world_size:,}"),
        ("Memory of the highest-memory rank", format_bytes(highest(report.ranks).memory.device_bytes)),
        *_phase_cards(report),
        *_gpu_cards(report.verdict),
    ]
    time = report.time
    if time is not None:
        cards.append(("Iteration", format_seconds(time.iteration_seconds)))
        if time.range_seconds is not None:
            cards.append(("Likely", " to ".join(map(format_seconds, time.range_seconds))))
        cards.append(("Tokens/s/GPU", f"{time.tokens_per_second_per_gpu:,.0f}"))
        cards.append(("Model FLOPs utilization", f"{time.model_flops_utilization:.1%}"))
        if time.training is not None:
            cards.append(("Training", f"{time.training.days:,.1f} days"))
            if time.training.cost is not None:
                cards.append(("Cost", f"{time.training.cost:,.0f}"))
    return (*cards, ("Parameters", _billions(report.parameters)))


def _changes(report: Report) -> Changes | None:
    """Changes that make a launch fit, or those that make one faster that fits."""
    if not report.advice:
        return None
    title = "Changes that make it faster" if report.verdict.fits else "Changes that make it fit"
    rows = [
        (
            each.change,
            format_bytes(each.device_bytes),
            "not known" if each.iteration_seconds is None else format_seconds(each.iteration_seconds),
        )
        for each in report.advice
    ]
    return Changes(title, ("Change", "Then needs", "Iteration"), tuple(rows))
