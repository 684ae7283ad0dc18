"""A small GPT on one node, defined by its sizes."""

from __future__ import annotations

from typing import Any

from analyzer.specs import (
    BatchSpec,
    HardwareSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    SoftwareSpec,
    TrainingFlags,
    TrainingJob,
)


def job(*, s: int = 1024, b: int = 2, h: int = 1024, a: int = 16, t: int = 1, sp: bool = False, **model: Any) -> TrainingJob:
    """Return a job with four layers and only tensor parallelism. `model` has further fields of ModelSpec."""
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": h,
        "ffn_hidden_size": 4 * h,
        "num_attention_heads": a,
        "num_query_groups": a,
        "kv_channels": h // a,
        "vocab_size": 50257,
        "padded_vocab_size": 51200,
        "max_position_embeddings": s,
        "position_embedding": "learned_absolute",
        "attention_backend": "unfused",
    }
    return TrainingJob(
        model=ModelSpec(**{**sizes, **model}),
        parallel=ParallelSpec(world_size=t, nodes=1, gpus_per_node=t, tensor=t, sequence_parallel=sp),
        batch=BatchSpec(micro_batch_size=b, global_batch_size=b, seq_length=s, microbatches=1, first_microbatches=1),
        precision=PrecisionSpec(parameters="bf16", gradients="fp32"),
        optimizer=OptimizerSpec(),
        recompute=RecomputeSpec(),
        flags=TrainingFlags(),
        hardware=HardwareSpec(),
        megatron="0.16.1",
        software=SoftwareSpec(te="2.11", torch="2.10"),
    )
