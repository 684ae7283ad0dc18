"""The modules of a vision-language model: a vision encoder, a projector, and a GPT that reads text and images.

Sources: core/models/multimodal/llava_model.py (0.16.1), and `get_batch` and `model_provider` of pretrain_vlm.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from analyzer.modules.embedding import embedding
from analyzer.modules.freezing import frozen
from analyzer.modules.head import adds_to_placeholder, cross_entropy, output_layer
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, ModuleRuns, layer_runs
from analyzer.modules.models.parts import CACHED_ENDS, Parts, Stack, cached_final_norm
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, STREAM, Module, Tensor, with_part
from analyzer.modules.vision import IMAGES, encoder_input, encoder_output, of_images, pixels_and_mask, projector
from analyzer.units import DTYPE_BYTES

if TYPE_CHECKING:
    from analyzer.modules.inputs import EndInputs, LayerInputs, ModuleInputs
    from analyzer.modules.models.parts import ChunkKind
    from analyzer.specs import VisionSpec

LANGUAGE: Final = "language_model"
INTEGERS: Final = "integer fields of the batch"
"""Name of the tensor of which tokens, positions and labels are views (`broadcast_data`, core/tensor_parallel/data.py)."""
_FIELDS: Final = 3
MERGED: Final = "merged input"
"""Name of the tensor with the embeddings of text and images."""


def vision_of(inputs: LayerInputs) -> VisionSpec:
    """The vision encoder and the projector of a vision-language model."""
    vision = inputs.model.vision
    assert vision is not None, "a vision-language model has an encoder"
    return vision


def llava_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of a chunk. The encoder and the projector are on the first stage, and every stage has the complete batch."""
    first, last = kind.pre_process, kind.post_process
    layers = layer_runs(inputs, kind.layers, received=not first)
    norm = ((cached_final_norm(inputs.of_ends), 1),) if kind.final_norm else ()
    decoder = Stack(f"{LANGUAGE}.decoder", (*(reading_merged_input(layers) if first else layers), *norm))
    language: Parts = (decoder, *(language_head(inputs.of_ends, embeds=first) if last else ()))
    if "language_model" in inputs.model.frozen:
        language = of_frozen_part(language, input_gradient=True)
    return (
        _batch(inputs.of_ends, first, last),
        *(_images(inputs) if first else ()),
        *(_text(inputs.of_ends, last) if first else ()),
        *language,
    )


def of_frozen_part(parts: Parts, *, input_gradient: bool) -> Parts:
    """The modules of a part that is not trained."""

    def one(module: Module) -> Module:
        return frozen(module, input_gradient=input_gradient)

    return tuple(
        each._replace(modules=tuple((one(module), times) for module, times in each.modules))
        if isinstance(each, Stack)
        else one(each)
        for each in parts
    )


@lru_cache(maxsize=CACHED_ENDS)
def _batch(inputs: EndInputs, first: bool, last: bool) -> Module:
    """The fields of a microbatch, which `forward_step` references until the forward returns.

    The first stage converts the pixels and the loss mask to the precision of the model (`Float16Module.forward`).
    """
    shapes, text, vision = Shapes(inputs), Shapes(inputs.of_part("text")), vision_of(inputs)
    tokens, images = text.b * text.s, shapes.b * vision.tiles
    floats = replace(pixels_and_mask(vision, images, tokens), made_in="")
    integers = Tensor(name=INTEGERS, shape=(_FIELDS * tokens,), dtype="int64", formula="24·s·b")
    learned = shapes.model.position_embedding == "learned_absolute"
    converted = inputs.dtype != "fp32" or "vision_model" in inputs.model.frozen or vision.is_radio
    unconverted = first and not converted  # the convolution saves it
    held = [*(() if unconverted else (floats,)), *(() if first and learned else (integers,))]
    stored = "vision_model" not in inputs.model.frozen and not vision.is_radio  # the convolution saves the images
    if first and inputs.dtype != "fp32" and not stored:
        held.append(replace(of_images(vision, images, IMAGES, inputs.dtype), made_in=""))
    if last:
        merged = (shapes.b, inputs.sequence_length)
        held.append(Tensor(name="labels of the merged sequence", shape=merged, dtype="int64", formula="8·s·b"))
    return Module(name="batch", kind=ModuleKind.BATCH, function=True, forward_held=tuple(held), source="pretrain_vlm.py get_batch")


def _images(inputs: ModuleInputs) -> Parts:
    """The encoder and the projector."""
    vision, encoder = vision_of(inputs), inputs.of_part("vision")
    parts_frozen = inputs.model.frozen
    layers = layer_runs(encoder, ((LayerKind(), vision.encoder.num_layers),))
    parts: Parts = (
        *encoder_input(vision, encoder.of_ends, inputs.micro_batch_size * vision.text_length),
        Stack("vision_model.decoder", tuple((layer.derived(in_encoder), times) for layer, times in layers)),
        *encoder_output(vision, encoder.of_ends),
    )
    projected = projector(vision, inputs.of_part("projector").of_ends, reads_frozen="vision_model" in parts_frozen)
    if "vision_model" in parts_frozen:
        parts = of_frozen_part(parts, input_gradient=False)
    if "vision_projection" in parts_frozen:
        projected = frozen(projected, input_gradient="vision_model" not in parts_frozen)
    return (*parts, projected, *(_tags(inputs.of_ends) if vision.tag_tokens else ()))


@lru_cache(maxsize=CACHED_ENDS)
def _tags(inputs: EndInputs) -> tuple[Module, ...]:
    """The lookup of the tags of all tiles, which are put before the tokens of the tiles (`LLaVAModel._apply_tile_tagging`).

    It reads the weight of the embedding of the text, whose gradient waits until that of this lookup is added to it.
    """
    vision = vision_of(inputs)
    tiles = inputs.micro_batch_size * vision.tiles
    tags = EndShapes(inputs.of_part("tags"))
    found = embedding(tags)

    def tokens(name: str, count: int) -> Tensor:
        return replace(tags.hidden(name), shape=(count, tiles, tags.model.hidden_size))

    of_tiles = tokens("embeddings of the tiles", vision.projected_tokens)
    joined = tokens("embeddings of the tiles with tags", vision.projected_tokens + vision.tag_tokens)
    weight = found.children[0].parameters[0]
    waiting = Tensor(name="weight gradient of the text", shape=weight.shape, dtype=weight.dtype, formula="size of the weight")
    looked_up = replace(
        found,
        name=f"{LANGUAGE}.embedding",
        repeats=True,
        forward_workspace=(of_tiles, joined),
        backward_workspace=(waiting,),
    )
    part = with_part(looked_up, "tags")
    return (frozen(part, input_gradient=False) if "language_model" in inputs.model.frozen else part,)


def in_encoder(layer: Module) -> Module:
    """A layer of the vision encoder."""
    return with_part(layer, "vision")


@lru_cache(maxsize=CACHED_ENDS)
def _text(inputs: EndInputs, last: bool) -> tuple[Module, ...]:
    """The lookup of the text, and its sequence with the embeddings of the images. `last`: the output layer is on the same stage."""
    vision, text = vision_of(inputs), EndShapes(inputs.of_part("text"))
    found = embedding(text, summed=last and adds_to_placeholder(inputs))
    integers = Tensor(name=INTEGERS, shape=(_FIELDS * text.b * text.s,), dtype="int64", formula="24·s·b", made_in=MODEL_PATH)
    children = tuple(
        replace(child, saved=(integers,)) if child.kind is ModuleKind.POSITION_EMBEDDINGS else child for child in found.children
    )
    looked_up = with_part(replace(found, name=f"{LANGUAGE}.embedding", children=children), "text")
    if "language_model" in inputs.model.frozen:
        looked_up = frozen(looked_up, input_gradient=False)
    return looked_up, _merged(inputs, vision, text)


def _merged(inputs: EndInputs, vision: VisionSpec, text: Shapes) -> Module:
    """The merged sequence (`LLaVAModel._preprocess_data`), of which a rank takes its part.

    The embeddings of the text are written at indices, which autograd saves if they need gradients: two for each token in the text,
    and its place in the sequence. Those of images are written where a mask of the sequence says. `forward` references those of
    text and images until it returns. The part of a tensor-parallel rank is a view of all tokens.
    """
    shapes = Shapes(replace(inputs, split=replace(inputs.split, sequence_parallel=False)))
    whole = Shapes(replace(shapes.inputs, split=replace(shapes.split, context=1)))
    words = text.s * text.b - shapes.b
    rows = shapes.b * vision.tiles * (vision.projected_tokens + vision.tag_tokens)
    trained = "language_model" not in inputs.model.frozen

    def embedded(name: str, tokens: int) -> Tensor:
        size = f"{DTYPE_BYTES[shapes.dtype]}·s·b·h"
        return Tensor(name=name, shape=(tokens, shapes.model.hidden_size), dtype=shapes.dtype, formula=size)

    def indices(name: str, columns: int, tokens: int) -> Tensor:
        shape = (tokens, columns) if columns > 1 else (tokens,)
        return Tensor(name=name, shape=shape, dtype="int64", formula="8 bytes for each index", made_in=MODEL_PATH)

    places = (indices("indices of the text", 2, words), indices("positions of the text", 1, words))
    zeros, merged = whole.hidden("sequence by sample"), shapes.hidden(MERGED, made_in=MODEL_PATH)
    texts, images = embedded("embeddings of the text", text.s * text.b), embedded("embeddings of the images", rows)
    return Module(
        name="merged",
        kind=ModuleKind.MERGED_INPUT,
        function=True,
        saved=(
            merged,
            *(places if trained else ()),
            Tensor(
                name="mask of the images",
                shape=(whole.b, whole.s),
                dtype="bool",
                formula="s·b",
                made_in=MODEL_PATH,
            ),
        ),
        forward_held=(texts, images),
        forward_workspace=(zeros,),
        backward_workspace=(
            whole.hidden("gradient by sample"),
            whole.hidden("gradient without images"),
            replace(images, name="gradient of the images"),
        ),
        collectives=shapes.tp("all_gather", "backward") if inputs.split.sequence_parallel else (),
        source="LLaVAModel._preprocess_data",
    )


def reading_merged_input(layers: ModuleRuns) -> ModuleRuns:
    """The layers, of which the first one reads the merged sequence that is stored already."""
    if not layers:
        return layers
    (module, times), *rest = layers
    following = ((module, times - 1),) if times > 1 else ()
    return ((module.derived(_first), 1), *following, *rest)


def _first(layer: Module) -> Module:
    """The layer with the input that the chunk stores."""
    saved = tuple(replace(each, shares=MERGED) if _is_input(each) else each for each in layer.saved)
    if saved != layer.saved or not layer.children:
        return replace(layer, saved=saved)
    return replace(layer, children=(_first(layer.children[0]), *layer.children[1:]))


def _is_input(tensor: Tensor) -> bool:
    return tensor.made_in == STREAM and not tensor.shares


@lru_cache(maxsize=CACHED_ENDS)
def language_head(inputs: EndInputs, *, embeds: bool = False) -> tuple[Module, ...]:
    """The output layer and the loss. `embeds`: the embedding is on the same stage, and has the same weight if they are tied."""
    shapes = Shapes(inputs)
    tied = shapes.model.tied_embeddings
    norm = f"{LANGUAGE}.decoder.{shapes.model.final_norm}"
    output = output_layer(
        shapes,
        owns_weight=not (tied and embeds),
        shared=tied and inputs.split.pipelined,
        embeds=tied and embeds,
        input_made_in=f"{MODEL_PATH}{norm}",
    )
    loss = cross_entropy(shapes, logits_made_in=f"{LANGUAGE}.output_layer")
    # the product with the loss mask saves the mask, which is as large as the loss
    saved = tuple(replace(each, name="loss mask", made_in=MODEL_PATH) if each.name == "loss" else each for each in loss.saved)
    return (
        replace(output, name=f"{LANGUAGE}.output_layer"),
        replace(loss, name=f"{LANGUAGE}.cross_entropy", saved=saved),
    )
