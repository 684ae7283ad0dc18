"""The console report of an inference launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.inference.memory import estimated_range
from analyzer.inference.results import BatchTime, InferenceReport, InferenceTime, StageMemory, StepSeconds
from analyzer.report.console.elements import BAD, GOOD, KEY, fields, heading, paragraph, points, table
from analyzer.report.console.names import plural
from analyzer.report.console.summary_section import cluster, gpu_rows, layout, model_shape
from analyzer.report.console.verdict_section import capacity_of, excess, left, share
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from analyzer.inference.results import ServingReport

PARTS = {
    "gemm": "GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "communication": "communication",
    "host": "GPU waits for the host",
}
"""Names of the parts of a step."""


def inference_sections(report: InferenceReport) -> list[RenderableType]:
    """The verdict, key figures, memory, times, warnings and assumptions."""
    text, style = verdict(report)
    return [
        *(paragraph(each, style=KEY, indent=0) for each in report.unknown),
        *([""] if report.unknown else []),
        paragraph(text, style=style, indent=0),
        *([paragraph(report.verdict.note, indent=0)] if report.verdict.note else []),
        "",
        fields(key_rows(report)),
        *([*heading("Warnings"), points(report.warnings)] if report.warnings else []),
        *_memory(report),
        *(_time(report.time) if report.time is not None else ()),
        *(_serving(report.serving) if report.serving is not None else ()),
        *heading("Assumptions"),
        points(report.assumptions),
    ]


def _serving(report: ServingReport) -> list[RenderableType]:
    from analyzer.report.console.serving_section import serving_sections  # imported for such launches only

    return serving_sections(report)


def verdict(report: InferenceReport) -> tuple[str, str]:
    """One sentence with the need of the highest-memory rank, and its style."""
    result = report.verdict
    stage = report.highest
    needs = f"rank {result.tightest_rank} (stage {stage.pipeline_rank})"
    size = format_bytes(stage.device_bytes)
    if result.capacity_bytes is None or result.headroom_bytes is None:
        return f"No verdict: the GPU is not known. {needs.capitalize()} needs the most memory, {size}.", KEY
    of = f"of {format_bytes(result.capacity_bytes)}" + (f" ({result.gpu})" if result.gpu else "")
    amount = f"{format_bytes(abs(result.headroom_bytes))} ({share(result.headroom_bytes, of=result.capacity_bytes)})"
    least, most = estimated_range(report.stages)
    if result.state == "tight" and most > result.capacity_bytes:
        ends = f"{format_bytes(least)} to {format_bytes(most)}"
        return f"It is tight: {needs} needs {size} {of}; the estimate ranges from {ends}. {left(result)}", KEY
    if result.state == "tight":
        margin = format_bytes(result.margin_bytes or 0)
        return f"It is tight: {needs} needs {size} {of}; the headroom of {amount} is below the margin of {margin}.", KEY
    if result.fits:
        return f"It fits: {needs} needs {size} {of}; {amount} remain free.", GOOD
    return f"It does not fit: {needs} needs {size}, and {capacity_of(result)}: {excess(result)}.", BAD


def key_rows(report: InferenceReport) -> list[tuple[str, str]]:
    job, spec, limits = report.job, report.job.inference, report.limits
    lengths = f"{spec.prompt_tokens:,} prompt tokens, {spec.generated_tokens:,} generated"
    batch = f"{plural(spec.batch_size, 'request')} on each replica: {lengths}"
    if spec.serving is not None:
        batch = f"{plural(spec.serving.clients, 'client')} of each replica: at most {lengths}"
    rows = [
        ("model", f"{model_shape(job.model)}, {job.precision.parameters}"),
        ("parameters", f"{format_count(report.parameters)}; {format_count(report.highest.parameters)} on a rank"),
        ("layout", f"{cluster(job.parallel)}: {layout(job.parallel, moe=job.model.moe is not None)}"),
        ("batch", batch),
    ]
    q = spec.quantization
    if (q.weight_bits, q.activation_bits, q.cache_bits) != (16, 16, 16):
        bits = f"weights {q.weight_bits} bits, activations {q.activation_bits} bits, cache {q.cache_bits} bits"
        rows.append(("quantization", bits))
    per_token = format_bytes(round(report.kv_cache_bytes_per_token))
    rows.append(("cache of a token", f"{per_token} in {plural(job.model.num_layers, 'layer')}"))
    if spec.dynamic is not None:
        rows.append(("cache buffer", f"{plural(report.cache_requests, 'request')} of {spec.sequence_length:,} tokens at a time"))
    if limits is not None:
        rows.append(("largest batch", _limit(limits.batch_size, "requests of these lengths")))
        rows.append(
            (
                "longest sequence",
                _limit(
                    limits.sequence_length, "tokens of one request" if spec.serving else f"tokens in a batch of {spec.batch_size}"
                ),
            )
        )
    return [*rows, *gpu_rows(report.verdict), ("method", f"formulas for Megatron-LM {job.megatron}")]


def _limit(value: int, what: str) -> str:
    return f"{value:,} {what}" if value else "none fits"


def _memory(report: InferenceReport) -> list[RenderableType]:
    """The parts of the memory of each pipeline stage. They add up to the peak."""
    stages = report.stages if len(report.stages) <= 4 else (report.highest,)
    title = "Memory of each rank" if len(stages) == len(report.stages) else "Memory of the highest-memory rank"
    header = ("", *(f"stage {stage.pipeline_rank}" for stage in stages))
    types = sorted({name for stage in stages for name in stage.weights_by_type})

    def row(name: str, values: list[str]) -> tuple[str, ...]:
        return (name, *values)

    rows = [
        row("  ranks", [_ranks(stage) for stage in stages]),
        *(
            row(f"{sign} weights, {name}", [format_bytes(stage.weights_by_type.get(name, 0)) for stage in stages])
            for sign, name in zip([" ", *"+" * len(types)], types, strict=False)
        ),
        row("+ KV cache", [format_bytes(stage.kv_cache_bytes) for stage in stages]),
        row("+ workspaces", [format_bytes(stage.runtime_bytes) for stage in stages]),
        row("+ temporary tensors, prefill", [format_bytes(_temporary(stage)) for stage in stages]),
        row("+ CUDA graphs of decode", [format_bytes(stage.graph_pool_bytes) for stage in stages]),
        row("= peak allocated", [format_bytes(stage.peak_bytes) for stage in stages]),
        row("  on the device", [format_bytes(stage.device_bytes) for stage in stages]),
    ]
    strong = (len(rows) - 2,)
    return [*heading(title), table(header, rows, align="l" + "r" * len(stages), strong=strong)]


def _temporary(stage: StageMemory) -> int:
    return max(stage.prefill_bytes, 0 if stage.graph_pool_bytes else stage.decode_bytes)


def _ranks(stage: StageMemory) -> str:
    spans = [f"{first}–{last}" if last > first else f"{first}" for first, last in stage.ranks[:3]]
    return ", ".join(spans) + (", …" if len(stage.ranks) > 3 else "")


def _time(time: InferenceTime) -> list[RenderableType]:
    given = time.given
    rows = [
        ("time to the first token", f"{format_seconds(given.prefill.total)} ({_shares(given.prefill)})"),
        ("time of an output token", f"{format_seconds(given.decode.total)} ({_shares(given.decode)})"),
        ("efficiencies", time.calibration),
    ]
    priced = any(each.cost_per_million_tokens is not None for each in time.others)
    listed = time.others
    header = ("batch size", "first token", "output token", "tokens/s", *(("cost of a million tokens",) if priced else ()), "")
    batches = table(
        header,
        [_batch(each, priced=priced) for each in listed],
        align="r" * (len(header) - 1) + "l",
        wrapped=(),
        strong=(next(index for index, each in enumerate(listed) if each is given),),
    )
    return [*heading("Time (estimate)"), fields(rows), "", batches]


def _batch(batch: BatchTime, *, priced: bool) -> tuple[str, ...]:
    cost = batch.cost_per_million_tokens
    return (
        str(batch.batch_size),
        format_seconds(batch.prefill.total),
        format_seconds(batch.decode.total),
        f"{batch.tokens_per_second:,.0f}",
        *((f"{cost:,.2f}" if cost is not None else "",) if priced else ()),
        "" if batch.fits else "does not fit",
    )


def _shares(step: StepSeconds) -> str:
    """The parts of a step in one line, largest first."""
    shares = sorted(((getattr(step, name) / step.total, text) for name, text in PARTS.items()), reverse=True)
    return ", ".join(f"{text} {part:.0%}" for part, text in shares if part >= 0.01)
