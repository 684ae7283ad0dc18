"""A model chunk as a tree: embedding, its layers, and the head, where they belong to it.

Source: core/models/gpt/gpt_model.py and core/transformer/transformer_block.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analyzer.modules.embedding import batch, embedding
from analyzer.modules.head import final_norm, head
from analyzer.modules.layer import LayerKind, layers_of_chunk
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import STREAM, Module, Parameter
from analyzer.results import Chunk
from analyzer.specs import BlockSpec, ParallelSpec, TrainingJob


@dataclass(frozen=True, kw_only=True)
class ChunkKind:
    """All that the tree of a chunk depends on beside the launch: chunks of one kind have equal trees."""

    layers: tuple[LayerKind, ...]
    """The kind of each decoder layer."""
    pre_process: bool = True
    post_process: bool = True
    final_norm: bool = True
    mtp_layers: int = 0


def kind_of(job: TrainingJob, chunk: Chunk) -> ChunkKind:
    """The kind of one chunk.

    The final norm comes with the loss, or with the last decoder layer where multi-token prediction layers follow it
    (`TransformerBlock.has_final_layernorm_in_this_stage`).
    """
    last = job.model.num_layers in chunk.layers
    kinds = layer_kinds(job, chunk.layers)
    if (
        job.activation_offload is not None
        and job.activation_offload.last_stays
        and kinds
        and chunk.post_process
        and not chunk.mtp_layers
    ):
        kinds = (*kinds[:-1], kinds[-1]._replace(stays=True))
    return ChunkKind(
        layers=kinds,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        final_norm=last if job.model.mtp_num_layers else chunk.post_process,
        mtp_layers=chunk.mtp_layers,
    )


def layer_kinds(job: TrainingJob, layers: Sequence[int]) -> tuple[LayerKind, ...]:
    """The kinds of these global layer numbers, from 1. Layers left in 16 bit: `is_first_last_bf16_layer`, core/fp8_utils.py."""
    moe, fp8 = job.model.moe, job.precision.fp8
    first, last = 0, job.model.num_layers
    if fp8 is not None:
        first, last = fp8.layers_at_start_in_16_bit, last - fp8.layers_at_end_in_16_bit
    on_host = 0 if job.activation_offload is None else job.activation_offload.layers
    windowed = job.model.windowed if job.model.window_backend else ()
    return tuple(
        LayerKind(
            mixture=moe is not None and moe.layers[layer - 1],
            in_16_bit=not first < layer <= last,
            other_kernel=bool(windowed) and windowed[layer - 1],
            on_host=layer <= on_host,
            block=job.model.blocks[layer - 1] if job.model.blocks else BlockSpec(),
        )
        for layer in layers
    )


def build(shapes: Shapes, kind: ChunkKind) -> Module:
    """The tree of a chunk of this kind: its root is named `gpt_model`, its modules as in Megatron, layers without their number."""
    layers = layers_of_chunk(shapes, kind.layers, received=not kind.pre_process)
    # a block of nothing hands on a copy of what its stage received (`TransformerBlock.forward`)
    copies = not (kind.pre_process or kind.layers or kind.final_norm)
    decoder = Module(
        name="decoder",
        saved=(shapes.hidden("received hidden states", made_in=STREAM),) if copies else (),
        children=(*layers, *((final_norm(shapes),) if kind.final_norm else ())),
        source="megatron.core.transformer.TransformerBlock",
    )
    first, last, predicts = kind.pre_process, kind.post_process, kind.mtp_layers > 0
    before: list[Module] = []
    if first or last or predicts:
        before.append(batch(shapes, tokens=first or predicts, labels=last or predicts))
    if first:
        before.append(embedding(shapes))
    after: tuple[Module, ...] = head(shapes, pre_process=first, mtp_here=predicts) if last else ()
    if shapes.model.mtp_num_layers:
        from analyzer.modules.models.mtp import embedding_weights, mtp_block, mtp_heads  # a millisecond that most need not spend

        if predicts and not first:
            before.append(embedding_weights(shapes))
        after = (
            *((mtp_block(shapes, after="decoder" if copies else "decoder.final_layernorm"),) if predicts else ()),
            *(mtp_heads(shapes) if last else ()),
            *after,
        )
    return Module(name="gpt_model", children=(*before, decoder, *after), source="megatron.core.models.gpt.GPTModel")


def full_model(job: TrainingJob) -> Module:
    """The model without parallelism: one rank, all layers, nothing split."""
    single = replace(job, parallel=ParallelSpec(world_size=1, nodes=1, gpus_per_node=1))
    kinds = layer_kinds(job, range(1, job.model.num_layers + 1))
    return build(Shapes(single), ChunkKind(layers=kinds, mtp_layers=job.model.mtp_num_layers))


def parameters(tree: Module) -> Iterator[Parameter]:
    """Every parameter of a tree, in the order of execution."""
    yield from tree.parameters
    for child in tree.children:
        yield from parameters(child)
