"""The console report of a serving engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.report.console.elements import fields, heading, paragraph, points, table
from analyzer.report.console.names import plural
from analyzer.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from analyzer.inference.results import ServedTime, ServingChoice, ServingReport, StepSeconds

NAMES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang", "megatron": "Megatron-LM"}
PARTS = {
    "gemm": "GEMMs", "attention": "attention", "memory_bound": "memory-bound kernels", "communication": "communication",
    "host": "GPU waits for the host",
}  # fmt: skip


def serving_sections(report: ServingReport) -> list[RenderableType]:
    """Times of the given number of clients and of others, and the result of a search."""
    return [
        *heading("Serving (estimate)"),
        fields(key_rows(report)),
        "",
        _table(report),
        *(["", points(report.not_counted)] if report.not_counted else []),
        *_search(report),
    ]


def key_rows(report: ServingReport) -> list[tuple[str, str]]:
    """The engine, a replica, and the times of the number of clients of the launch."""
    spec, given = report.spec, report.given
    replica = f"{plural(report.gpus, 'GPU')}"
    if report.attention_data > 1:
        replica += f", {report.attention_data} groups with different requests (data-parallel attention)"
    rows = [("engine", f"{NAMES[spec.engine]}, kernels measured on {report.tables_gpu}"), ("replica", replica)]
    if report.cache_tokens is not None:
        share = f"{spec.memory_share:.0%} of the memory is used"
        rows.append(("cache", f"{report.cache_tokens:,} tokens, {report.cache_requests:,} requests of these lengths; {share}"))
    options = _options(report)
    if options:
        rows.append(("requests", options))
    wait = "; requests wait for room in the cache" if given.waits else ""
    rows += [
        (
            "first token",
            f"{format_seconds(given.first_seconds)} on average, {format_seconds(given.first_later_seconds)} after the first "
            f"requests{wait}",
        ),
        ("output token", f"{format_seconds(given.token_seconds)} on average"),
        (
            "throughput",
            f"{given.tokens_per_second:,.0f} tokens/s of all replicas; {given.running:.1f} requests generate on a replica",
        ),
        ("step of decode", f"{format_seconds(report.decode.total)} ({_shares(report.decode)})"),
        (
            "step of a prompt",
            f"{format_seconds(report.prompt.total)} ({_shares(report.prompt)}); {given.prompt_share:.0%} of the time",
        ),
    ]
    if given.cost_per_million_tokens is not None:
        rows.append(("cost of a million tokens", f"{given.cost_per_million_tokens:,.2f}"))
    return rows


def _options(report: ServingReport) -> str:
    spec = report.spec
    parts = []
    if spec.wait_steps:
        parts.append(f"prompts wait at most {spec.wait_steps} steps for others")
    if spec.receive_steps > 1:
        parts.append(f"new requests are read every {spec.receive_steps} steps")
    if spec.captured_tokens:
        parts.append(f"steps with prompts of at most {spec.captured_tokens:,} tokens are CUDA graphs")
    if spec.prefix:
        parts.append(f"{spec.prefix:.0%} of each prompt is in the cache")
    if spec.draft_tokens:
        parts.append(
            f"{plural(spec.draft_tokens, 'token')} proposed in a step, {spec.tokens_per_step:.2f} tokens of a request on average"
        )
    if spec.prefill_replicas:
        parts.append(f"{plural(spec.prefill_replicas, 'replica')} for prompts beside each that generates")
    return "; ".join(parts)


def _table(report: ServingReport) -> RenderableType:
    priced = report.given.cost_per_million_tokens is not None
    header = ("clients", "first token", "output token", "tokens/s", *(("cost of a million tokens",) if priced else ()), "")
    place = next(index for index, each in enumerate(report.others) if each == report.given)
    rows = [_row(each, priced=priced) for each in report.others]
    return table(header, rows, align="r" * (len(header) - 1) + "l", wrapped=(), strong=(place,))


def _row(time: ServedTime, *, priced: bool) -> tuple[str, ...]:
    cost = time.cost_per_million_tokens
    return (
        f"{time.clients:,}",
        format_seconds(time.first_seconds),
        format_seconds(time.token_seconds),
        f"{time.tokens_per_second:,.0f}",
        *((f"{cost:,.2f}" if cost is not None else "",) if priced else ()),
        "waits for the cache" if time.waits else "",
    )


def _search(report: ServingReport) -> list[RenderableType]:
    if not report.front:
        return []
    found: list[RenderableType] = [*heading("Layouts that meet the times, the cheapest first")]
    if not report.choices:
        found.append(paragraph("No layout meets both times."))
    else:
        found.append(_choices(report.choices))
        found.append(paragraph("Options of the first: " + " ".join(report.choices[0].options)))
    found += [*heading("Front of throughput and time of an output token"), _choices(report.front)]
    return found


def _choices(choices: tuple[ServingChoice, ...]) -> RenderableType:
    header = ("GPUs", "replicas", "TP", "attention DP", "EP", "clients", "first token", "output token", "tokens/s/GPU")
    rows = [
        (
            *map(str, (each.gpus, each.replicas, each.tensor, each.attention_data, each.expert)), f"{each.time.clients:,}",
            format_seconds(each.time.first_seconds), format_seconds(each.time.token_seconds),
            f"{each.time.tokens_per_second / each.gpus:,.0f}",
        )
        for each in choices
    ]  # fmt: skip
    return table(header, rows, align="r" * len(header), wrapped=())


def _shares(step: StepSeconds) -> str:
    """The parts of a step in one line, largest first."""
    shares = sorted(((getattr(step, name) / step.total, text) for name, text in PARTS.items()), reverse=True)
    return ", ".join(f"{text} {part:.0%}" for part, text in shares if part >= 0.01)
