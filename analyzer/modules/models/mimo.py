"""The modules of a MIMO model with images: CLIP of transformers, a projector that is trained, and a GPT.

Sources: core/models/mimo/model/base.py and core/models/mimo/submodules/vision.py (0.16.1), and
examples/mimo/model_providers/{llava_vlm,hf_clip_encoder}.py and `get_batch` of examples/mimo/train.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from analyzer.modules.embedding import embedding
from analyzer.modules.freezing import frozen
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.layer import LayerKind, layer_runs
from analyzer.modules.models.llava import (
    LANGUAGE,
    MERGED,
    in_encoder,
    language_head,
    of_frozen_part,
    reading_merged_input,
    vision_of,
)
from analyzer.modules.models.parts import CACHED_ENDS, Parts, Stack, cached_final_norm
from analyzer.modules.norm import norm_parameters
from analyzer.modules.shapes import EndShapes, Shapes
from analyzer.modules.tree import MODEL_PATH, Module, Tensor, with_part
from analyzer.modules.vision import encoder_input, of_images, projector, tokens_of
from analyzer.units import DTYPE_BYTES

if TYPE_CHECKING:
    from analyzer.modules.inputs import EndInputs, ModuleInputs
    from analyzer.modules.models.parts import ChunkKind
    from analyzer.specs import VisionSpec

_INTEGER_FIELDS: Final = 3
"""Tokens, labels and positions, of the length of the merged sequence."""


def mimo_parts(inputs: ModuleInputs, kind: ChunkKind) -> Parts:
    """The modules of the only chunk: a MIMO model of Megatron's example has no pipeline stages."""
    layers = layer_runs(inputs, kind.layers)
    norm = ((cached_final_norm(inputs.of_ends), 1),)
    language: Parts = (
        Stack(f"{LANGUAGE}.decoder", (*reading_merged_input(layers), *norm)),
        *language_head(inputs.of_ends),
    )
    trained = "language_model" not in inputs.model.frozen
    return (
        _batch(inputs.of_ends),
        *_images(inputs),
        *_text(inputs.of_ends),
        *(language if trained else of_frozen_part(language, input_gradient=True)),
    )


@lru_cache(maxsize=CACHED_ENDS)
def _batch(inputs: EndInputs) -> Module:
    """The fields of a microbatch, which `forward_step` references until the forward returns."""
    vision, tokens = vision_of(inputs), inputs.micro_batch_size * inputs.sequence_length
    images = replace(of_images(vision, inputs.micro_batch_size * vision.tiles, "pixels", "fp32"), made_in="")
    fields = (
        Tensor(name="integer fields of the batch", shape=(_INTEGER_FIELDS * tokens,), dtype="int64", formula="24·s·b"),
        images,
        Tensor(name="loss mask", shape=(tokens,), dtype="fp32", formula="4·s·b"),
    )
    return Module(
        name="batch", kind=ModuleKind.BATCH, function=True, forward_held=fields, source="examples/mimo/train.py get_batch"
    )


def _images(inputs: ModuleInputs) -> Parts:
    """CLIP without gradients, and the projector."""
    vision, encoder = vision_of(inputs), inputs.of_part("vision")
    layers = layer_runs(encoder, ((LayerKind(), vision.encoder.num_layers),))
    parts: Parts = (
        *encoder_input(vision, encoder.of_ends, inputs.micro_batch_size * vision.text_length),
        Stack("vision_model.decoder", tuple((layer.derived(in_encoder), times) for layer, times in layers)),
        _encoder_output(vision, encoder.of_ends),
    )
    return (*of_frozen_part(parts, input_gradient=False), projector(vision, inputs.of_part("projector").of_ends, reads_frozen=True))


@lru_cache(maxsize=CACHED_ENDS)
def _encoder_output(vision: VisionSpec, encoder: EndInputs) -> Module:
    """The hidden states of all layers exist until the encoder returns (`output_hidden_states`). One of them is used.

    The norm after the last layer has parameters, and its output is not used.
    """
    shapes = Shapes(encoder)
    states = tuple(replace(shapes.hidden("hidden states of the layers"), pieces=1) for _ in range(vision.encoder.num_layers + 1))
    kept = tokens_of(shapes, "tokens for the projector", count=vision.projected_tokens)
    module = Module(
        name="vision_model.post_layernorm",
        kind=ModuleKind.VISION_OUTPUT,
        parameters=norm_parameters(shapes, shapes.model.hidden_size),
        forward_workspace=(*states, kept),
        source="transformers.CLIPVisionModel",
    )
    return with_part(module, "vision")


@lru_cache(maxsize=CACHED_ENDS)
def _text(inputs: EndInputs) -> tuple[Module, ...]:
    """The lookup of the text, and its sequence with the embeddings of the images."""
    looked_up = with_part(replace(embedding(EndShapes(inputs.of_part("text"))), name=f"{LANGUAGE}.embedding"), "text")
    if "language_model" in inputs.model.frozen:
        looked_up = frozen(looked_up, input_gradient=False)
    return looked_up, _merged(inputs, vision_of(inputs))


def _merged(inputs: EndInputs, vision: VisionSpec) -> Module:
    """The merged sequence (`MimoModel.align_embeddings_by_token_positions`), of which a rank takes its part.

    Embeddings of images and text are written where masks say, which autograd saves. The kernel of `masked_scatter_` copies the mask
    to each element, and numbers the elements in int64 (aten/src/ATen/native/cuda/IndexKernel.cpp).
    """
    shapes = Shapes(inputs)
    whole = Shapes(replace(inputs, split=replace(inputs.split, context=1)))
    rows = shapes.b * vision.tiles * vision.projected_tokens
    width = shapes.model.hidden_size

    def embedded(name: str, tokens: int) -> Tensor:
        size = f"{DTYPE_BYTES[shapes.dtype]}·s·b·h"
        return Tensor(name=name, shape=(tokens, width), dtype=shapes.dtype, formula=size)

    def mask(name: str) -> Tensor:
        return Tensor(name=name, shape=(whole.b, whole.s), dtype="bool", formula="s·b", made_in=MODEL_PATH)

    elements = (whole.b, whole.s, width)
    zeros = whole.hidden("sequence by sample")
    images = embedded("embeddings of the images", rows)
    return Module(
        name="merged",
        kind=ModuleKind.MERGED_INPUT,
        function=True,
        saved=(shapes.hidden(MERGED, made_in=MODEL_PATH), mask("mask of the images"), mask("mask of the text")),
        forward_held=(images, embedded("embeddings of the text", vision.text_length * shapes.b)),
        forward_workspace=(
            zeros,
            Tensor(name="mask of each element", shape=elements, dtype="bool", formula="s·b·h"),
            Tensor(name="numbers of the elements", shape=elements, dtype="int64", formula="8·s·b·h"),
        ),
        backward_workspace=(
            whole.hidden("gradient by sample"),
            whole.hidden("gradient without the text"),
            replace(images, name="gradient of the images"),
        ),
        source="MimoModel.align_embeddings_by_token_positions",
    )
