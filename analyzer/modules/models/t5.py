"""The modules of a T5: an encoder, and a decoder with cross-attention, which share the embedding.

Sources: core/models/T5/{t5_model,t5_spec}.py (0.16.1), and `get_batch` of pretrain_t5.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.modules.attention.cross_attention import ENCODED, ENCODER_OUTPUT, NORM, cross_attention
from analyzer.modules.attention.unfused_attention import saves_batch_mask
from analyzer.modules.embedding import embedding, saved_mask
from analyzer.modules.head import adds_to_placeholder, cross_entropy, output_layer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import CACHED_LAYERS, LayerKind, ModuleRuns, checkpoint_of, checkpoint_sizes, one_layer
from analyzer.modules.models.bert import BATCH, batch_fields
from analyzer.modules.models.parts import CACHED_ENDS, Parts, Stack, cached_final_norm
from analyzer.modules.norm import standalone_norm
from analyzer.modules.residual.dropout import bias_dropout_add
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import LAYER, MODEL_PATH, Module, Tensor, with_part

if TYPE_CHECKING:
    from analyzer.modules.inputs import EndInputs, LayerInputs, ModuleInputs
    from analyzer.modules.models.parts import ChunkKind

_ENCODER_FIELDS: Final = 2
"""Fields of the length of the encoder: its tokens and their padding mask."""
_DECODER_FIELDS: Final = 4
"""Fields of the length of the decoder: its tokens, labels, loss mask and padding mask."""
_ADDITION_BEFORE: Final = "self_attn_bda"
_GRADIENT: Final = "gradient of the encoder's output"
_WEIGHT_GRADIENT: Final = "weight gradient of the embedding from the decoder"


def t5_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a T5. It has no pipeline stages, and encoder and decoder have the same number of layers."""
    encoder, decoder = inputs.of_part("encoder"), inputs.of_part("decoder")
    count = sum(times for _, times in kind.layers)
    fields, kept = _batch(inputs)
    first, second = _embeddings(inputs)
    return (
        fields,
        first,
        kept,
        Stack("encoder", (*_encoder_layers(encoder, count), (with_part(cached_final_norm(encoder.of_ends), "encoder"), 1))),
        second,
        Stack("decoder", (*_decoder_layers(inputs, count), (with_part(cached_final_norm(decoder.of_ends), "decoder"), 1))),
        *_head(decoder.of_ends),
    )


@lru_cache(maxsize=CACHED_ENDS)
def _batch(inputs: ModuleInputs) -> tuple[Module, Module]:
    """The batch of one microbatch, and what is saved of it for the backward.

    Lookups without tensor parallelism save views of the fields, and the loss saves the loss mask. For local layers there is a mask
    of each pair of tokens for each attention (`T5MaskedWordPieceDataset.config_attention_mask`).
    """
    encoder, decoder, cross = (Shapes(inputs.of_part(part)) for part in ("encoder", "decoder", "cross"))
    local = encoder.model.implementation == "local"
    fields = batch_fields((_ENCODER_FIELDS * encoder.s + _DECODER_FIELDS * decoder.s) * encoder.b)
    loss_mask = Tensor(name="loss mask", shape=(decoder.b, decoder.s), dtype="fp32", formula="4·s·b", made_in=MODEL_PATH)
    masks = tuple(
        _mask(shapes, part, local=local) for part, shapes in (("encoder", encoder), ("decoder", decoder), ("cross", cross))
    )
    keeps = [inputs.checkpoints_attention or saves_batch_mask(shapes) for shapes in (encoder, decoder, cross)]
    saved = (
        *((fields,) if encoder.t == 1 else ()),
        loss_mask,
        *(mask for mask, keep in zip(masks, keeps, strict=True) if keep),
    )
    held = tuple(each for each in (fields, *masks) if each not in saved)
    return (
        Module(
            name="batch",
            kind=ModuleKind.BATCH,
            function=True,
            forward_held=tuple(replace(each, made_in="") for each in held),
            forward_workspace=tuple(replace(each, made_in="") for each in saved),
            source="pretrain_t5.py get_batch",
        ),
        saved_mask(saved),
    )


def _mask(shapes: Shapes, part: str, *, local: bool) -> Tensor:
    """[b, 1, queries, keys] for local layers, else a mask of tokens."""
    shape = (shapes.b, 1, shapes.s if local else 1, shapes.inputs.keys)
    return Tensor(name=f"attention mask ({part})", shape=shape, dtype="bool", formula="b·s·e", made_in=MODEL_PATH)


@lru_cache(maxsize=CACHED_ENDS)
def _embeddings(inputs: ModuleInputs) -> tuple[Module, Module]:
    """The lookups of the encoder and of the decoder, whose weights are the same parameters.

    Backward runs the one of the decoder first. Autograd keeps its gradients until it can add those of the encoder to them.
    """
    encoder, decoder = EndShapes(inputs.of_part("encoder").of_ends), EndShapes(inputs.of_part("decoder").of_ends)
    first = with_part(embedding(encoder, ids_in=BATCH), "encoder")
    second = with_part(embedding(decoder, summed=adds_to_placeholder(decoder.inputs), ids_in=BATCH), "decoder")
    weights = tuple(
        Tensor(name=_WEIGHT_GRADIENT, shape=each.shape, dtype=each.dtype, formula="size of the weight")
        for child in second.children
        for each in child.parameters
    )
    held = (*second.backward_workspace, _output_gradient(encoder))
    children = tuple(replace(child, parameters=()) for child in second.children)
    return first, replace(second, children=children, waiting=weights, backward_workspace=held)


def _output_gradient(encoder: Shapes) -> Tensor:
    """[e, b, h]: the sum of the gradients that layers of the decoder have computed for the encoder."""
    return encoder.hidden(_GRADIENT)


class _Place(NamedTuple):
    """Where a layer is in its block."""

    first: bool
    last: bool
    checkpointed: bool
    input_shares: str
    """The tensor of a checkpoint that already stores its input."""


def _encoder_layers(encoder: ModuleInputs, count: int) -> ModuleRuns:
    def layer(place: _Place) -> Module:
        return with_part(one_layer(encoder, LayerKind(), place.input_shares), "encoder")

    return _layers(encoder, count, layer)


def _decoder_layers(inputs: ModuleInputs, count: int) -> ModuleRuns:
    """The first layer or checkpoint stores the output of the encoder, which all of them read."""
    decoder, encoded = inputs.of_part("decoder"), Shapes(inputs.of_part("encoder")).hidden(ENCODER_OUTPUT, made_in=ENCODED)

    def layer(place: _Place) -> Module:
        stores = place.first and not place.checkpointed
        return _decoder_layer(inputs.of_dense_layers, place.input_shares, stores, place.last)

    return _layers(decoder, count, layer, also=(encoded,))


def _layers(inputs: ModuleInputs, count: int, layer: Callable[[_Place], Module], *, also: tuple[Tensor, ...] = ()) -> ModuleRuns:
    """`count` layers in order; those that full recompute covers are under checkpoints. The first checkpoint also stores `also`."""
    made: list[Module] = []
    begin = 0
    for size in checkpoint_sizes(inputs.recompute, count):
        places = [
            _Place(begin + index == 0, begin + index == count - 1, size > 0, "checkpoint input" if size and not index else "")
            for index in range(max(1, size))
        ]
        inside = tuple(layer(place) for place in places)
        made.append(_checkpoint(inputs.of_checkpoints, inside, also if begin == 0 else ()) if size else inside[0])
        begin += len(inside)
    groups = (tuple(equal) for _, equal in groupby(made, key=id))
    return tuple((equal[0], len(equal)) for equal in groups)


def _checkpoint(inputs: LayerInputs, layers: tuple[Module, ...], also: tuple[Tensor, ...]) -> Module:
    made = checkpoint_of(Shapes(inputs), layers)
    return replace(made, saved=(*made.saved, *also))


@lru_cache(maxsize=CACHED_LAYERS)
def _decoder_layer(inputs: LayerInputs, input_shares: str, stores: bool, last: bool) -> Module:
    """A layer of the decoder: cross-attention between self-attention and the FFN (`TransformerLayer`).

    The gradient of the encoder's output stays allocated from the backward of the last layer on. `stores`: the layer stores that
    output; otherwise it is stored already.
    """
    decoder = Shapes(inputs.of_part("decoder"))
    plain = one_layer(decoder.inputs, LayerKind(), input_shares)
    place = 1 + next(index for index, child in enumerate(plain.children) if child.name == _ADDITION_BEFORE)
    between = (
        standalone_norm(decoder, NORM, ModuleKind.ATTENTION_NORM, input_made_in=LAYER),
        cross_attention(inputs, stores=stores),
        bias_dropout_add(decoder, "cross_attn_bda", ModuleKind.ATTENTION_ADD, biased=decoder.model.bias_linear),
    )
    held = () if last else (_output_gradient(Shapes(inputs.of_part("encoder"))),)
    layer = replace(
        plain,
        children=(*plain.children[:place], *between, *plain.children[place:]),
        backward_workspace=(*plain.backward_workspace, *held),
    )
    return with_part(layer, "decoder")


@lru_cache(maxsize=CACHED_ENDS)
def _head(decoder: EndInputs) -> tuple[Module, ...]:
    """The output layer, which has a bias if its weight is that of the embedding (`T5LMHead`), and the loss."""
    shapes = Shapes(decoder)
    tied = shapes.model.tied_embeddings
    output = output_layer(shapes, owns_weight=not tied, shared=False, embeds=tied, biased=tied)
    children = (replace(output, waiting=()),)
    head = Module(name="lm_head", children=children, waiting=output.waiting, source="megatron.core.models.T5.T5LMHead")
    return with_part(head, "decoder"), with_part(cross_entropy(shapes, logits_made_in="lm_head.output_layer"), "decoder")
