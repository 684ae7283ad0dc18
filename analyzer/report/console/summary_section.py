"""Key figures of the launch, at the start of the report; warnings, assumptions, and how to see more."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from analyzer.memory.verdict import highest
from analyzer.report.console.elements import KEY, fields, heading, paragraph, points
from analyzer.report.console.names import plural
from analyzer.report.console.verdict_section import share
from analyzer.results import Report, Verdict
from analyzer.specs import FAMILY_NAMES, ModelSpec, OptimizerSpec, ParallelSpec, TrainingJob
from analyzer.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

ENGINES = {"formula": "formulas", "shadow": "a recorded step of the shadow engine", "both": "formulas and a recorded step"}
FASTER: Final = 3
"""Changes that make a launch faster, of which the key figures name so many."""
BALANCED: Final = "Balanced routing is assumed"
"""The assumption that can change memory and time the most: of MoE models."""
SECTIONS = ("memory", "time", "groups", "communication", "tree")
"""Values of --info-detail that name one section."""


def key_figures(report: Report) -> list[RenderableType]:
    """The rows of the key figures."""
    rows = key_rows(report)
    if stated := _stated(report):
        largest = "; the largest: balanced routing" if any(text.startswith(BALANCED) for text in stated) else ""
        rows.append(("assumptions", f"{len(stated)}, at the end of this report{largest}"))
    return ["", fields(rows)]


def key_rows(report: Report) -> list[tuple[str, str]]:
    """Time, model, parameters, layout, batch, peak of the highest-memory rank, GPU capacity and headroom, with their names."""
    job = report.job
    rank = highest(report.ranks)
    parameters = format_count(report.parameters)
    if report.parameters_active != report.parameters:
        parameters += f" ({format_count(report.parameters_active)} active per token)"
    if report.parameters_adapters:
        parameters += f", and {format_count(report.parameters_adapters)} of adapters"
    m = rank.memory
    return [
        *_time_rows(report),
        ("model", _model(job)),
        ("parameters", f"{parameters}; {format_count(rank.parameters)} on rank {rank.ranks[0][0]}"),
        ("layout", f"{cluster(job.parallel)}: {_layout(job)}"),
        ("batch", _batch(job)),
        ("peak", f"{format_bytes(m.peak_allocated_bytes)} allocated, {format_bytes(m.peak_reserved_bytes)} reserved, "
                 f"{format_bytes(m.device_bytes)} on the device (rank {rank.ranks[0][0]})"),
        *gpu_rows(report.verdict),
        ("method", f"{ENGINES[report.engine]} for Megatron-LM {job.megatron}{_newest(report)}"),
    ]  # fmt: skip


def _time_rows(report: Report) -> list[tuple[str, str]]:
    """The time of an iteration and of the training, and changes that make the launch faster, where they are known."""
    time = report.time
    if time is None:
        return []
    likely = "" if time.range_seconds is None else f" (likely {' to '.join(map(format_seconds, time.range_seconds))})"
    speed = f"{time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {time.model_flops_utilization:.1%}"
    rows = [("iteration", f"{format_seconds(time.iteration_seconds)}{likely}, {speed}")]
    if time.training is not None:
        cost = "" if time.training.cost is None else f", {time.training.cost:,.0f} in all"
        rows.append(("training", f"{time.training.days:,.1f} days, {time.training.gpu_hours:,.0f} GPU-hours{cost}"))
    if report.verdict.fits:
        for each in report.advice[:FASTER]:
            if each.iteration_seconds is not None:
                gain = 1 - each.iteration_seconds / time.iteration_seconds
                rows.append(("faster", f"{gain:.0%} less time with {each.change}"))
    return rows


def _newest(report: Report) -> str:
    """That the release is assumed, and what the newest one would need."""
    newest = report.newest
    if newest is None:
        return ""
    if newest.peak_difference_bytes is None:
        what = f"refuses {newest.refused}" if newest.refused else "refuses the launch"
    elif not newest.peak_difference_bytes:
        what = "needs the same"
    else:
        more = "more" if newest.peak_difference_bytes > 0 else "less"
        what = f"needs {format_bytes(abs(newest.peak_difference_bytes))} {more}"
    return f" (assumed; {newest.release} {what})"


def gpu_rows(result: Verdict) -> list[tuple[str, str]]:
    """The GPU with its capacity, and the headroom, where they are known; no headroom if the launch does not fit."""
    if result.capacity_bytes is None:
        return [("GPU capacity", "not known")]
    capacity = format_bytes(result.capacity_bytes) + (f" ({result.gpu})" if result.gpu else "")
    if result.headroom_bytes is None or result.headroom_bytes < 0:
        return [("GPU capacity", capacity)]
    of = share(result.headroom_bytes, of=result.capacity_bytes)
    phase = f", in the {result.other_phase} phase" if result.other_phase else ""
    return [("GPU capacity", capacity), ("headroom", f"{format_bytes(result.headroom_bytes)} ({of} of the capacity){phase}")]


def _model(job: TrainingJob) -> str:
    mtp = plural(job.model.mtp_num_layers, "MTP layer") if job.model.mtp_num_layers else ""
    parts = [model_shape(job.model), mtp, f"{job.precision.parameters}{_quantized(job)}"]
    return ", ".join(part for part in parts if part)


_LAYER_TYPES: Final = {
    "M": "Mamba",
    "G": "gated delta net",
    "*": "attention",
    "D": "sparse attention",
    "+": "latent attention",
    "-": "FFN",
    "E": "MoE",
}
"""Names of the layer types of a hybrid pattern."""


def model_shape(model: ModelSpec) -> str:
    """Layers, sizes, heads, vocabulary and experts."""
    heads = f"{model.num_attention_heads} attention heads"
    if model.num_query_groups != model.num_attention_heads:
        heads += f", GQA with {plural(model.num_query_groups, 'group')}"
    padded = f" (padded to {model.padded_vocab_size:,})" if model.padded_vocab_size != model.vocab_size else ""
    parts = [
        f"{_layers(model)}{_layer_types(model)}",
        f"hidden size {model.hidden_size:,}, {_ffn(model)}, {heads}",
        f"vocabulary size {model.vocab_size:,}{padded}",
        f"{model.moe.num_experts} experts (top {model.moe.topk})" if model.moe else "",
        "MLA" if model.mla else "",
    ]
    return ", ".join(part for part in parts if part)


def _layer_types(model: ModelSpec) -> str:
    """The number of layers of each type of a hybrid model, in brackets."""
    if model.hybrid is None:
        return ""
    counts = ((model.hybrid.pattern.count(letter), name) for letter, name in _LAYER_TYPES.items())
    return f" ({', '.join(f'{count} {name}' for count, name in counts if count)})"


def _layers(model: ModelSpec) -> str:
    """'GPT, 24 layers', for T5 the layers of its encoder and of its decoder, for images also the encoder and what is frozen."""
    name = FAMILY_NAMES[model.family] if model.hybrid is None else "Mamba hybrid"
    if model.vision is not None:
        encoder = f"{plural(model.vision.encoder.num_layers, 'layer')} in the encoder ({model.vision.kind})"
        still = f", frozen: {' and '.join(model.frozen)}" if model.frozen else ""
        return f"{name}, {plural(model.num_layers, 'layer')}, {encoder}{still}"
    if model.decoder_seq_length is None:
        return f"{name}, {plural(model.num_layers, 'layer')}"
    return f"{name}, {model.num_layers} encoder and {plural(model.num_layers, 'decoder layer')}"


def _ffn(model: ModelSpec) -> str:
    """The FFN hidden size; its range for layers that differ by configuration."""
    full = [block for block in model.blocks if block.feed_forward == "full"]
    widths = {block.ffn_hidden_size or model.ffn_hidden_size for block in full} if model.blocks else {model.ffn_hidden_size}
    if len(widths) > 1:
        return f"FFN hidden size {min(widths):,} to {max(widths):,}"
    return f"FFN hidden size {widths.pop():,}" if widths else "no FFN"


def _quantized(job: TrainingJob) -> str:
    fp8 = job.precision.fp8
    return f" and FP8 ({fp8.recipe})" if fp8 is not None else ""


def cluster(world: ParallelSpec) -> str:
    """'16 GPUs (2 nodes of 8)'."""
    return f"{plural(world.world_size, 'GPU')} ({plural(world.nodes, 'node')} of {world.gpus_per_node})"


def _layout(job: TrainingJob) -> str:
    """'TP2 DP4, sequence parallelism, distributed optimizer (ZeRO-1)'."""
    p = job.parallel
    parts = [
        layout(p, moe=job.model.moe is not None),
        "sequence parallelism" if p.sequence_parallel and p.tensor > 1 else "",
        _sharding(job) if p.data > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def layout(p: ParallelSpec, *, moe: bool) -> str:
    """'TP2 DP4'."""
    sizes = {
        "TP": p.tensor,
        "PP": p.pipeline,
        "VPP": p.virtual_pipeline or 1,
        "CP": p.context,
        "EP": p.expert,
        "ETP": p.expert_tensor if moe else 1,
        "DP": p.data,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "no parallelism"


def _sharding(job: TrainingJob) -> str:
    """How data-parallel ranks share model states."""
    optimizer, fsdp = job.optimizer, job.fsdp
    if fsdp is not None:
        return "torch FSDP2" if fsdp.implementation == "torch" else f"Megatron-FSDP ({fsdp.strategy})"
    if optimizer.muon is not None and optimizer.muon.layer_wise:
        if optimizer.muon.aligned:
            return "shards of full matrices, distributed optimizer (ZeRO-1) for the other parameters"
        return "full parameters distributed over data-parallel ranks"
    return "distributed optimizer (ZeRO-1)" if optimizer.distributed else ""


def _batch(job: TrainingJob) -> str:
    batch = job.batch
    text = (
        f"Micro-batch size {batch.micro_batch_size}, global batch size {format_count(batch.global_batch_size)}: "
        f"{plural(batch.microbatches, 'microbatch', 'microbatches')} per iteration per data-parallel rank; "
        f"sequence length {batch.seq_length:,}"
    )
    return text if job.optimizer.name == OptimizerSpec.name else f"{text}; optimizer {job.optimizer.name}"


def unknown(report: Report) -> list[RenderableType]:
    """What the launch does not say or this program does not know; printed before the verdict."""
    return [*(paragraph(text, style=KEY, indent=0) for text in report.unknown), ""] if report.unknown else []


def warnings(report: Report) -> list[RenderableType]:
    """Assumptions about options that are given."""
    return [*heading("Warnings"), points(report.warnings)] if report.warnings else []


def assumptions(report: Report) -> list[RenderableType]:
    """The assumptions that are not printed as warnings."""
    stated = _stated(report)
    return [*heading("Assumptions"), points(stated)] if stated else []


def _stated(report: Report) -> list[str]:
    return [text for text in report.assumptions if text not in report.warnings]


def how_to_see_more(report: Report, detail: Collection[str]) -> list[RenderableType]:
    """The values of --info-detail that print more than this report."""
    printed = {*detail} if report.time is not None else {*detail, "time"}
    left = [name for name in SECTIONS if name not in printed]
    if "full" in detail or not left:
        return []
    return ["", paragraph(f"More: --info-detail {', '.join(left)} or full (all sections).", indent=0)]
