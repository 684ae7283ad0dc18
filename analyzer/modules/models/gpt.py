"""The module tree of a model chunk, and the modules of a GPT: embedding, layers and output layer, if the chunk has them.

Source: core/models/gpt/gpt_model.py and core/transformer/transformer_block.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Final

from analyzer.layout.stages import Chunk
from analyzer.modules.embedding import batch, embedding, saved_mask
from analyzer.modules.head import adds_to_placeholder, head
from analyzer.modules.inputs import EndInputs, LayerInputs, ModuleInputs, Split, one_projection_in_userbuffers
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, LayerRuns, ModuleRuns, layer_runs, with_other_kernel
from analyzer.modules.models.parts import CACHED_ENDS, ROOTS, ChunkKind, Parts, Stack, cached_final_norm
from analyzer.modules.shapes import AllShapes, EndShapes, Shapes
from analyzer.modules.tree import STREAM, Module
from analyzer.specs import AttentionKind, BlockSpec, Family, Fp8Spec, ModelSpec, TrainingJob
from analyzer.specs.hybrid import LETTERS

CACHED_CHUNKS: Final = 1024
"""Maximum number of cached chunk trees. They share their layers, embeddings and heads."""


def has_final_norm(*, last_layer: bool, post_process: bool, mtp_layers: int) -> bool:
    """Whether a chunk has the final norm: the one with the loss or, if MTP layers follow, the one with the last decoder layer.

    Source: `TransformerBlock.has_final_layernorm_in_this_stage`.
    """
    return last_layer if mtp_layers else post_process


def chunk_kind(job: TrainingJob, chunk: Chunk) -> ChunkKind:
    """The kind of one chunk."""
    model, in_userbuffers = job.model, one_projection_in_userbuffers(job)
    layers = layer_kinds(model, job.precision.fp8)
    return ChunkKind(
        layers=layers_of_chunk(layers, chunk.layers[0] - 1, chunk.layers[-1], in_userbuffers) if chunk.layers else (),
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        final_norm=has_final_norm(
            last_layer=model.num_layers in chunk.layers, post_process=chunk.post_process, mtp_layers=model.mtp_num_layers
        ),
        mtp_layers=chunk.mtp_layers,
    )


def layers_of_chunk(runs: LayerRuns, start: int, end: int, in_userbuffers: bool) -> LayerRuns:
    """The layers from `start` to before `end`, counted from 0. `in_userbuffers`: the first one projects in userbuffers."""
    found = _part_of_runs(runs, start, end)
    if not (found and in_userbuffers):
        return found
    (kind, times), *rest = found
    following = ((kind, times - 1),) if times > 1 else ()
    return ((kind._replace(projects_in_userbuffers=True), 1), *following, *rest)


def _part_of_runs(runs: LayerRuns, start: int, end: int) -> LayerRuns:
    found = []
    before = 0
    for kind, times in runs:
        inside = min(before + times, end) - max(before, start)
        before += times
        if inside > 0:
            found.append((kind, inside))
    return tuple(found)


@lru_cache(maxsize=CACHED_ENDS)
def layer_kinds(model: ModelSpec, fp8: Fp8Spec | None) -> LayerRuns:
    """The kinds of all decoder layers. Layers in 16 bit: `is_first_last_bf16_layer`, core/fp8_utils.py."""
    moe = model.moe
    first, last = 0, model.num_layers
    if fp8 is not None:
        first, last = fp8.layers_at_start_in_16_bit, last - fp8.layers_at_end_in_16_bit
    windowed = with_other_kernel(model)
    differ = moe is not None or windowed or model.blocks or fp8 is not None or model.linear_attention is not None
    differ = differ or model.compressed_attention is not None
    absorbed = model.absorbed_attention
    if not differ and model.plugin is None and (absorbed is None or not absorbed.shares):
        return ((LayerKind(), model.num_layers),)
    kinds = (
        LayerKind(
            moe=moe is not None and moe.layers[layer],
            in_16_bit=not first <= layer < last,
            other_kernel=bool(windowed) and windowed[layer],
            global_heads=model.global_heads is not None and not model.windowed[layer],
            block=model.blocks[layer] if model.blocks else BlockSpec(),
            attention=_other_attention(model, layer),
        )
        for layer in range(model.num_layers)
    )
    return tuple((kind, sum(1 for _ in equal)) for kind, equal in groupby(kinds))


def _other_attention(model: ModelSpec, layer: int) -> AttentionKind | None:
    kind = model.attention_of(layer)
    return None if kind == model.full_attention else kind


@lru_cache(maxsize=CACHED_CHUNKS)
def chunk_tree(inputs: ModuleInputs, kind: ChunkKind) -> Module:
    """The tree of a chunk. Its root is named as in `ROOTS` and its modules as in Megatron, layers without their number."""
    name, source = ROOTS[inputs.model.family]
    parts = _parts(inputs, kind)
    return Module(
        name=name,
        kind=ModuleKind.MODEL,
        children=tuple(_block(each) if isinstance(each, Stack) else each for each in parts),
        source=source,
    )


def _block(stack: Stack) -> Module:
    return Module(
        name=stack.name,
        kind=ModuleKind.DECODER,
        saved=stack.received,
        children=tuple(module for module, times in stack.modules for _ in range(times)),
        part=stack.modules[0][0].part if stack.modules else "",
        source="megatron.core.transformer.TransformerBlock",
    )


@lru_cache(maxsize=CACHED_CHUNKS)
def chunk_modules(inputs: ModuleInputs, kind: ChunkKind) -> ModuleRuns | None:
    """The modules of a chunk in order, without its tree; None if the decoder itself has tensors."""
    parts = _parts(inputs, kind)
    if any(isinstance(each, Stack) and each.received for each in parts):
        return None
    return tuple(run for each in parts for run in (each.modules if isinstance(each, Stack) else ((each, 1),)))


def _parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    parts = _trained_parts(inputs, kind)
    if not (inputs.model.vision_weights and kind.pre_process):
        return parts
    from analyzer.modules.models.vision_weights import vision_weights

    return (*vision_weights(inputs.of_ends), *parts)


def _trained_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a chunk with adapters and frozen parameters, without the vision part of a framework."""
    parts = parts_function(inputs.model.family)(inputs, kind)
    if inputs.model.frozen_parameters is not None:
        from analyzer.modules.partly_frozen import with_frozen_parameters

        others = replace(inputs, model=replace(inputs.model, frozen=("language_model",)))
        return with_frozen_parameters(parts, inputs.model, of_frozen_experts=gpt_parts(others, kind))
    if inputs.model.adapters is None:
        return parts
    from analyzer.modules.adapters.insertion import with_adapters

    plain = parts if inputs.fp8 is None else parts_function(inputs.model.family)(replace(inputs, fp8=None), kind)
    return with_adapters(parts, inputs, kind, in_16_bit=plain)


def parts_function(family: Family) -> Callable[[ModuleInputs, ChunkKind], Parts]:
    """The function that lists the modules of a chunk. Those of other families than GPT are imported on first use."""
    if family == "bert":
        from analyzer.modules.models.bert import bert_parts

        return bert_parts
    if family == "t5":
        from analyzer.modules.models.t5 import t5_parts

        return t5_parts
    if family == "llava":
        from analyzer.modules.models.llava import llava_parts

        return llava_parts
    if family == "mimo":
        from analyzer.modules.models.mimo import mimo_parts

        return mimo_parts
    return gpt_parts


def gpt_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a chunk of a GPT."""
    shapes = AllShapes(inputs)
    copies = not (kind.pre_process or kind.layers or kind.final_norm)
    first, last, predicts = kind.pre_process, kind.post_process, kind.mtp_layers > 0
    before: list[Module] = []
    gets_batch = first or last or predicts
    layers = layer_runs(inputs if gets_batch else inputs.without_batch, kind.layers, received=not first)
    if gets_batch:
        before.append(_batch_of_chunk(inputs, kind))
    if first:
        whole = before[0]
        before.append(_embedding(inputs.of_ends, last, bool(layers and layers[0][0].outlives)))
        if whole.saved and not inputs.separate_graphs:  # otherwise the state of a chunk references the attention mask
            copied = whole.saved if whole.forward_workspace else ()
            before = [
                replace(whole, saved=(), forward_workspace=(*copied, *whole.forward_workspace)), before[1], saved_mask(whole.saved)
            ]  # fmt: skip
    after: tuple[Module, ...] = _head(inputs.of_ends, first, predicts) if last else ()
    received = (shapes.hidden("received hidden states", made_in=STREAM),) if copies else ()
    if inputs.model.mtp_num_layers:
        from analyzer.modules.models.mtp import embedding_weights, mtp_block, mtp_heads, received_depths

        if received and last and not predicts:
            received = (received_depths(shapes, made_in=STREAM),)
        embeds = inputs.model.tied_embeddings and (first or predicts) and not inputs.separate_graphs
        if predicts and not first:
            before.append(embedding_weights(shapes))
        decoded = "decoder" if copies else f"decoder.{inputs.model.final_norm}"
        after = (
            *((mtp_block(shapes, after=decoded, embeds=first, heads=last),) if predicts else ()),
            *(mtp_heads(shapes, made_in="mtp" if predicts else "decoder", embeds=embeds) if last else ()),
            *after,
        )
    norm: ModuleRuns = ((cached_final_norm(inputs.of_ends), 1),) if kind.final_norm else ()
    if inputs.model.hyper_connections is not None:
        from analyzer.modules.residual.hyper_connections import contraction, expansion, recomputed_together

        layers = recomputed_together(layers)
        before += [expansion(shapes)] if first else []
        norm = ((contraction(shapes), 1), *norm) if norm else ()
    return (*before, Stack("decoder", (*layers, *norm), received), *after)


def _batch_of_chunk(inputs: ModuleInputs, kind: ChunkKind) -> Module:
    """The batch. A checkpoint of whole layers saves the attention mask for any layer, that of attention only for its own."""
    reads_mask = _reads_mask(inputs.model, kind)
    of_layers = bool(kind.layers or kind.mtp_layers) and inputs.recompute.granularity == "full"
    checkpointed = inputs.of_batches if reads_mask or of_layers else inputs.of_batches.without_recompute
    return _batch(checkpointed, kind.pre_process or kind.mtp_layers > 0, reads_mask)


def _reads_mask(model: ModelSpec, kind: ChunkKind) -> bool:
    """Whether any layer of a chunk reads the attention mask."""
    if any(layer.reads_mask for layer, _ in kind.layers):
        return True
    if model.hybrid is None:
        return kind.mtp_layers > 0
    letters = (LETTERS[letter] for letter in (model.hybrid.mtp_pattern if kind.mtp_layers else ""))
    return any(LayerKind(block=letter.block, attention=letter.attention).reads_mask for letter in letters)


@lru_cache(maxsize=CACHED_ENDS)
def _batch(inputs: LayerInputs, embeds: bool, layers: bool) -> Module:
    return batch(Shapes(inputs), embeds=embeds, layers=layers)


@lru_cache(maxsize=CACHED_ENDS)
def _embedding(inputs: EndInputs, last: bool, kept_gradient: bool) -> Module:
    return embedding(EndShapes(inputs), summed=last and adds_to_placeholder(inputs), kept_gradient=kept_gradient)


@lru_cache(maxsize=CACHED_ENDS)
def _head(inputs: EndInputs, pre_process: bool, mtp_here: bool) -> tuple[Module, ...]:
    if inputs.model.head_outputs is not None:
        from analyzer.modules.models.sample_head import sample_head

        return sample_head(EndShapes(inputs))
    if inputs.model.token_score:
        from analyzer.modules.models.sample_head import token_score_head

        return token_score_head(EndShapes(inputs), pre_process=pre_process)
    if inputs.model.distillation is not None and inputs.model.distillation.framework == "NeMo-RL":
        from analyzer.modules.models.nemo_rl_distillation import nemo_rl_head

        return nemo_rl_head(EndShapes(inputs), pre_process=pre_process)
    if inputs.model.log_probability_loss:
        from analyzer.modules.models.nemo_rl_loss import log_probability_head

        return log_probability_head(EndShapes(inputs), pre_process=pre_process)
    if inputs.model.distillation is not None:
        from analyzer.modules.models.distillation import distillation_head

        return distillation_head(EndShapes(inputs), pre_process=pre_process)
    return head(EndShapes(inputs), pre_process=pre_process, mtp_here=mtp_here)


def full_model(inputs: ModuleInputs) -> Module:
    """The unsharded model: all layers on one rank."""
    model = inputs.model
    kinds = layer_kinds(model, inputs.fp8)
    return chunk_tree(replace(inputs, split=Split()), ChunkKind(layers=kinds, mtp_layers=model.mtp_num_layers))
