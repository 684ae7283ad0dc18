"""A model chunk as a tree: embedding, its layers, and the head, where they belong to it.

Source: core/models/gpt/gpt_model.py and core/transformer/transformer_block.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.modules.embedding import batch, embedding
from analyzer.modules.head import final_norm, head
from analyzer.modules.layer import layers_of_chunk
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter
from analyzer.results import Chunk
from analyzer.specs import Launch, ParallelSpec


def chunk_tree(launch: Launch, chunk: Chunk) -> Module:
    """The tree of one chunk; its root is named `gpt_model`, its modules as in Megatron, layers without their number."""
    return build(
        Shapes(launch), mixtures=mixtures(launch, chunk.layers), pre_process=chunk.pre_process, post_process=chunk.post_process
    )


def mixtures(launch: Launch, layers: Sequence[int]) -> tuple[bool, ...]:
    """For each of these global layer numbers, from 1, whether it is a mixture of experts."""
    moe = launch.model.moe
    return tuple(moe is not None and moe.layers[layer - 1] for layer in layers)


def build(shapes: Shapes, *, mixtures: tuple[bool, ...], pre_process: bool, post_process: bool) -> Module:
    """As `chunk_tree`, for layers of these kinds: chunks that are alike have equal trees."""
    decoder = Module(
        name="decoder",
        children=(*layers_of_chunk(shapes, mixtures), *((final_norm(shapes),) if post_process else ())),
        source="megatron.core.transformer.TransformerBlock",
    )
    return Module(
        name="gpt_model",
        children=(
            *((batch(shapes, tokens=pre_process, labels=post_process),) if pre_process or post_process else ()),
            *((embedding(shapes),) if pre_process else ()),
            decoder,
            *(head(shapes, pre_process=pre_process) if post_process else ()),
        ),
        source="megatron.core.models.gpt.GPTModel",
    )


def full_model(launch: Launch) -> Module:
    """The model without parallelism: one rank, all layers, nothing split."""
    single = replace(launch, parallel=ParallelSpec(world_size=1, nodes=1, gpus_per_node=1))
    kinds = mixtures(launch, range(1, launch.model.num_layers + 1))
    return build(Shapes(single), mixtures=kinds, pre_process=True, post_process=True)


def parameters(tree: Module) -> Iterator[Parameter]:
    """Every parameter of a tree, in the order of execution."""
    yield from tree.parameters
    for child in tree.children:
        yield from parameters(child)
