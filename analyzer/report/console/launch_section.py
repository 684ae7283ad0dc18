"""What was understood, first of all, and what was taken for granted, last of all."""

from __future__ import annotations

from analyzer.report.console.names import plural
from analyzer.report.console.text import INDENT, KEY, Line, heading, wrap
from analyzer.results import Report
from analyzer.specs import ModelSpec, TrainingJob
from analyzer.units import format_count

ENGINES = {"formula": "by formula", "shadow": "by shadow recording", "both": "by formula and shadow recording"}


def job(report: Report, *, width: int) -> list[Line]:
    """Three sentences: the model, the cluster and its layout, the batch."""
    asked = report.job
    world = asked.parallel
    cluster = f"{plural(world.world_size, 'GPU')}, {plural(world.nodes, 'node')} of {world.gpus_per_node}: {_layout(asked)}."
    batch = asked.batch
    samples = (
        f"Micro-batch {batch.micro_batch_size}, global batch {format_count(batch.global_batch_size)}: "
        f"{batch.microbatches:,} of them in an iteration on each replica, sequences of {batch.seq_length:,} tokens."
        + ("" if asked.optimizer.name == "adam" else f" Optimizer {asked.optimizer.name}.")
    )
    engine = f"Megatron-LM {asked.megatron}, {ENGINES[report.engine]}."
    texts = (f"{_model(asked)} {engine}", cluster, samples)
    return [line for text in texts for line in wrap(text, width=width, rest=INDENT, style=KEY)]


def _model(job: TrainingJob) -> str:
    model = job.model
    heads = f"{model.num_attention_heads} heads"
    if model.num_query_groups != model.num_attention_heads:
        heads += f" in {model.num_query_groups} groups"
    padded = f" (padded to {model.padded_vocab_size:,})" if model.padded_vocab_size != model.vocab_size else ""
    return (
        f"GPT, {model.num_layers} layers, hidden size {model.hidden_size:,}, {_feed_forward(model)}, {heads}, "
        f"vocabulary {model.vocab_size:,}{padded}, {_more(job)}{job.precision.parameters}{_quantized(job)}."
    )


def _feed_forward(model: ModelSpec) -> str:
    """Its width, or the widths where layers differ by configuration."""
    full = [block for block in model.blocks if block.feed_forward == "full"]
    widths = {block.ffn_hidden_size or model.ffn_hidden_size for block in full} if model.blocks else {model.ffn_hidden_size}
    if len(widths) > 1:
        return f"feed-forward {min(widths):,} to {max(widths):,}"
    return f"feed-forward {widths.pop():,}" if widths else "no feed-forward"


def _more(job: TrainingJob) -> str:
    """What a dense model of the usual kind has not."""
    model = job.model
    parts = [
        f"{model.moe.num_experts} experts, {model.moe.topk} for each token" if model.moe else "",
        "latent attention" if model.mla else "",
        plural(model.mtp_num_layers, "prediction layer") if model.mtp_num_layers else "",
    ]
    return "".join(f"{part}, " for part in parts if part)


def _quantized(job: TrainingJob) -> str:
    fp8 = job.precision.fp8
    return f" and FP8 ({fp8.recipe})" if fp8 is not None else ""


def _layout(job: TrainingJob) -> str:
    p = job.parallel
    sizes = [
        ("tensor", p.tensor, " with sequence parallelism" if p.sequence_parallel else ""),
        ("pipeline", p.pipeline, f" in {p.virtual_pipeline} virtual stages each" if p.virtual_pipeline else ""),
        ("context", p.context, ""),
        ("expert", p.expert, ""),
        ("data", p.data, _sharded(job)),
    ]
    return ", ".join(f"{name} {size}{more}" for name, size, more in sizes if size > 1) or "no parallelism"


def _sharded(job: TrainingJob) -> str:
    """How replicas share out states, and an optimizer other than Adam."""
    optimizer, fsdp = job.optimizer, job.fsdp
    if fsdp is not None:
        how = "torch FSDP2" if fsdp.implementation == "torch" else f"Megatron-FSDP ({fsdp.strategy})"
    elif optimizer.muon is not None and optimizer.muon.layer_wise:
        how = (
            "whole matrices in shards, the rest with the distributed optimizer"
            if optimizer.muon.aligned
            else "whole parameters shared out"
        )
    else:
        how = "the distributed optimizer" if optimizer.distributed else ""
    return f" with {how}" if how else ""


def assumptions(report: Report, *, width: int) -> list[Line]:
    """What was taken for granted, one point each."""
    if not report.assumptions:
        return []
    points = [line for text in report.assumptions for line in wrap(text, width=width, first=f"{INDENT}· ", rest=INDENT * 2)]
    return [*heading("Assumptions", width=width), *points]
