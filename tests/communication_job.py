"""Small jobs and models for the tests of buffers and communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzer.layout.stages import Chunk, chunks
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Collective, Module, Parameter
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

SEQUENCE, BATCH, HIDDEN = 64, 2, 32


def make_job(**changes: Any) -> TrainingJob:
    """Return a job with a bf16 model and fp32 gradients on one GPU.

    `changes` are fields of any spec of the job, or `megatron`.
    """
    specs: dict[str, Any] = {
        "model": ModelSpec(
            num_layers=8,
            hidden_size=HIDDEN,
            ffn_hidden_size=4 * HIDDEN,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=8,
            vocab_size=100,
            padded_vocab_size=128,
            max_position_embeddings=SEQUENCE,
            position_embedding="rope",
        ),
        "parallel": ParallelSpec(world_size=1, nodes=1, gpus_per_node=8),
        "batch": BatchSpec(micro_batch_size=BATCH, global_batch_size=16, seq_length=SEQUENCE, microbatches=8, first_microbatches=8),
        "precision": PrecisionSpec(parameters="bf16", gradients="fp32"),
        "optimizer": OptimizerSpec(),
        "recompute": RecomputeSpec(),
        "flags": TrainingFlags(),
        "hardware": HardwareSpec(),
        "software": SoftwareSpec(te="2.11", torch="2.10"),
    }
    megatron = changes.pop("megatron", "0.16.1")
    for field, value in changes.items():
        owner = next(name for name, spec in specs.items() if hasattr(spec, field))
        specs[owner] = replace(specs[owner], **{field: value})
    return TrainingJob(**specs, megatron=megatron)


def make_layer(job: TrainingJob, number: int) -> Module:
    """Return a layer with four all-reduces of [s, b, h], as without sequence parallelism."""
    shape = (job.batch.seq_length // job.parallel.context, job.batch.micro_batch_size, job.model.hidden_size)

    def linear(name: str, kind: ModuleKind, phase: Any, numel: int) -> Module:
        return Module(
            name=name,
            kind=kind,
            parameters=(Parameter(name="weight", shape=(numel,), dtype="bf16", sharding="tensor"),),
            collectives=(Collective(kind="all_reduce", group="tp", shape=shape, dtype="bf16", phase=phase),),
        )

    attention = (
        linear("linear_qkv", ModuleKind.QKV, "backward", 3000),
        linear("linear_proj", ModuleKind.ATTENTION_OUTPUT, "forward", 1000),
    )
    mlp = (linear("linear_fc1", ModuleKind.FC1, "backward", 4000), linear("linear_fc2", ModuleKind.FC2, "forward", 4100))
    children = (
        Module(name="self_attention", kind=ModuleKind.ATTENTION, children=attention),
        Module(name="mlp", kind=ModuleKind.FEED_FORWARD, children=mlp),
    )
    return Module(name=str(number), children=children)


def make_tree(job: TrainingJob, chunk: Chunk) -> Module:
    """Return a chunk: embedding, layers and output layer. With several stages, tied embeddings are marked as shared."""
    tied = job.model.tied_embeddings and job.parallel.pipeline > 1
    table = Parameter(name="weight", shape=(128 // job.parallel.tensor, HIDDEN), dtype="bf16", shared_embedding=tied)
    children = [Module(name="embedding", parameters=(table,))] if chunk.pre_process else []
    layers = Module(name="layers", children=tuple(make_layer(job, number) for number in chunk.layers))
    children.append(Module(name="decoder", children=(layers,)))
    if chunk.post_process and job.parallel.pipeline > 1:
        children.append(Module(name="output_layer", parameters=(table,)))
    return Module(name="GPTModel", children=tuple(children))


def make_stages(job: TrainingJob) -> tuple[StageModel, ...]:
    """Return the stages of the model of `make_tree`, one per pipeline rank of the job."""
    return tuple(
        StageModel(pipeline_rank=rank, chunks=of_rank, trees=tuple(make_tree(job, chunk) for chunk in of_rank))
        for rank, of_rank in enumerate(chunks(job.model.num_layers, job.parallel))
    )
