"""The console report of generation with offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.inference.offload.policy import Policy, Schedule
from analyzer.report.console.elements import BAD, GOOD, KEY, fields, heading, paragraph, points, table
from analyzer.report.console.names import plural
from analyzer.report.console.summary_section import model_shape
from analyzer.report.console.verdict_section import share
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from analyzer.inference.offload.estimate import OffloadReport, Tier
    from analyzer.inference.offload.search import Found
    from analyzer.inference.offload.steps import Seconds

TENSORS: Final = ("weights", "KV cache", "activations")


def offload_sections(report: OffloadReport) -> list[RenderableType]:
    """The verdict, key figures, placement, memory, times, policies and assumptions."""
    job = report.job
    text, style = verdict(report)
    return [
        *(paragraph(each, style=KEY, indent=0) for each in report.unknown),
        *([""] if report.unknown else []),
        paragraph(text, style=style, indent=0),
        "",
        fields(key_rows(report)),
        *([*heading("Warnings"), points(job.warnings)] if job.warnings else []),
        *_placement(report),
        *_memory(report),
        *_time(report),
        *(_front(report) if report.front else ()),
        *heading("Assumptions"),
        points((*job.assumptions, *report.assumptions)),
    ]


def verdict(report: OffloadReport) -> tuple[str, str]:
    needs = ", ".join(f"{tier.name} {_of(tier)}" for tier in report.tiers if tier.total)
    over = [tier for tier in report.tiers if tier.total > tier.capacity]
    if over:
        missing = " and ".join(f"{format_bytes(int(tier.total - tier.capacity))} on {tier.name}" for tier in over)
        if report.verdict.state == "tight":
            return f"It is tight: {needs}; {missing} too much, unless the vocabulary is smaller.", KEY
        return f"It does not fit: {needs}; {missing} too much.", BAD
    if report.verdict.state == "tight":
        enough = (report.verdict.headroom_bytes or 0) >= (report.verdict.margin_bytes or 0)
        return f"It is tight: {needs}.{' It does not fit with a larger vocabulary.' if enough else ''}", KEY
    return f"It fits: {needs}.", GOOD


def _of(tier: Tier) -> str:
    return f"{format_bytes(int(tier.total))} of {format_bytes(int(tier.capacity))}"


def key_rows(report: OffloadReport) -> list[tuple[str, str]]:
    spec, seconds = report.job.inference, report.seconds
    schedule = report.policy.schedule
    steps = spec.generated_tokens - 1
    of_token = format_seconds(seconds.decode / steps) if steps else "none"
    tokens = f"{spec.prompt_tokens:,} prompt tokens, {spec.generated_tokens:,} generated"
    cost = report.cost_per_million_tokens
    headroom = [_headroom(tier) for tier in report.tiers if tier.total <= tier.capacity]
    return [
        ("model", f"{model_shape(report.job.model)}, {report.job.precision.parameters}"),
        ("parameters", format_count(report.parameters)),
        ("requests", f"{schedule.block_size} in a block: {tokens}"),
        ("policy", policy_text(report.policy)),
        ("methods", _methods(schedule)),
        ("headroom", ", ".join(headroom) or "none"),
        ("throughput", f"{_rate(report.tokens_per_second)} tokens/s"),
        ("latency", f"{format_seconds(seconds.total)} for the block"),
        ("first token", format_seconds(seconds.prefill)),
        ("output token", of_token),
        *([("cost of a million", f"{cost:,.2f}")] if cost is not None else []),
    ]


def _headroom(tier: Tier) -> str:
    free = int(tier.capacity - tier.total)
    return f"{tier.name} {format_bytes(free)} ({share(free, of=int(tier.capacity))} of the capacity)"


def policy_text(policy: Policy) -> str:
    """The policy as `--info-offload` takes it."""
    schedule = policy.schedule
    names = ("weights", "cache", "activations")
    parts = [f"{name}={shares.text()}" for name, shares in zip(names, policy.placement, strict=True)]
    parts += [f"batches={schedule.batches}"] if schedule.batches > 1 else []
    compressed = [name for name, flag in (("weights", schedule.compressed_weights), ("cache", schedule.compressed_cache)) if flag]
    parts += [f"compress={'+'.join(compressed)}"] if compressed else []
    parts += ["attention=cpu"] if schedule.attention_on_cpu else []
    parts += [] if schedule.overlapped else ["overlap=no"]
    parts += [] if schedule.pinned_weights else ["pin=no"]
    return ",".join(parts)


def _methods(schedule: Schedule) -> str:
    return ", ".join(
        (
            f"{plural(schedule.batches, 'batch', 'batches')} of {plural(schedule.batch_size, 'request')}",
            f"attention of the decode on the {'CPU' if schedule.attention_on_cpu else 'GPU'}",
            "transfers overlap with computation" if schedule.overlapped else "transfers do not overlap",
            f"{'pinned' if schedule.pinned_weights else 'pageable'} host memory for weights",
        )
    )


def _placement(report: OffloadReport) -> list[RenderableType]:
    """Nominal and actual percentages."""
    rows = [
        (name, format_bytes(int(size)), nominal.text(), " / ".join(f"{100 * share:.2f}" for share in actual))
        for name, size, nominal, actual in zip(TENSORS, report.sizes, report.policy.placement, report.actual, strict=True)
    ]
    return [*heading("Placement: percent on GPU / host / disk"), table(("", "bytes", "nominal", "actual"), rows, align="lrrr")]


def _memory(report: OffloadReport) -> list[RenderableType]:
    def row(name: str, values: list[float]) -> tuple[str, ...]:
        return (name, *(format_bytes(int(value)) for value in values))

    shown = report.tiers
    bits = "4 bit" if report.policy.schedule.compressed_weights else report.job.precision.parameters
    rows = [
        row(f"  weights, {bits}", [tier.weights for tier in shown]),
        row("+ KV cache", [tier.cache for tier in shown]),
        row("+ activations", [tier.activations for tier in shown]),
        row("+ buffers and intermediate tensors", [tier.buffers for tier in shown]),
        row("= peak", [tier.total for tier in shown]),
        row("  capacity", [tier.capacity for tier in shown]),
    ]
    return [*heading("Memory of each tier"), table(("", *(tier.name for tier in shown)), rows, align="lrrr", strong=(4,))]


def _time(report: OffloadReport) -> list[RenderableType]:
    """Times with and without overlap."""
    own, other = ("yes", "no") if report.policy.schedule.overlapped else ("no", "yes")
    tokens = report.policy.schedule.block_size * report.job.inference.generated_tokens

    def row(name: str, seconds: Seconds) -> tuple[str, ...]:
        return (name, format_seconds(seconds.prefill), format_seconds(seconds.decode), _rate(tokens / seconds.total))

    rows = [row(own, report.seconds), row(other, report.other_seconds)]
    return [*heading("Time (estimate)"), table(("overlap", "prefill", "decode", "tokens/s"), rows, align="lrrr", strong=(0,))]


def _front(report: OffloadReport) -> list[RenderableType]:
    header = ("block", "latency", "tokens/s", "policy")
    rows = [_found(each) for each in report.front]
    title = "Latency and throughput: no other policy is better in both"
    return [*heading(title), table(header, rows, align="rrrl", wrapped=(3,))]


def _found(found: Found) -> tuple[str, ...]:
    size = str(found.policy.schedule.block_size)
    return (size, format_seconds(found.seconds.total), _rate(found.throughput), policy_text(found.policy).replace(",", ", "))


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.3g}" if tokens_per_second < 1000 else f"{tokens_per_second:,.0f}"
