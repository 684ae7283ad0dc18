"""The vision encoder of a vision-language model, and the projector of its output to the width of the language model.

Sources: core/models/vision/{clip_vit_model,radio,multimodal_projector}.py and core/models/multimodal/llava_model.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from analyzer.modules.freezing import without_input_gradient
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.mlp import activation
from analyzer.modules.models.parts import CACHED_ENDS
from analyzer.modules.norm import norm_parameters, norm_statistics, partial_sums
from analyzer.modules.radio import embedder, positions
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import MODEL_PATH, OUTPUT_GRADIENT, Module, Parameter, Tensor, largest, with_part
from analyzer.units import DTYPE_BYTES

if TYPE_CHECKING:
    from analyzer.modules.inputs import EndInputs
    from analyzer.specs import VisionSpec

IMAGES: Final = "images"
"""Name of the tensor with the images in the precision of the model."""
MODEL: Final = "vision_model"
PROJECTOR: Final = "vision_projection"
_CHANNELS: Final = 3
_CLIP: Final = ("clip", "hf_clip")
"""Encoders with a norm before the first layer, and without a bias of the patches."""
_PROJECTED: Final = "output without bias"
_MADE_IN: Final = {
    "mlp.linear_fc1": f"{MODEL_PATH}{PROJECTOR}.encoder.linear_fc1",
    "mlp": f"{MODEL_PATH}{PROJECTOR}.encoder",
}
"""Where the parts of an MLP allocate their outputs, if the MLP is that of the projector."""


def of_images(vision: VisionSpec, images: int, name: str, dtype: str) -> Tensor:
    """[n, 3, H, W]: the pixels of all tiles of a microbatch."""
    shape = (images, _CHANNELS, vision.image_height, vision.image_width)
    return Tensor(name=name, shape=shape, dtype=dtype, formula=f"{DTYPE_BYTES[dtype]}·3·H·W·n", made_in=MODEL_PATH)


def pixels_and_mask(vision: VisionSpec, images: int, tokens: int) -> Tensor:
    """The fp32 tensor of which the pixels of all tiles and the loss mask of the text are views (`broadcast_data`)."""
    pixels = _CHANNELS * vision.image_height * vision.image_width * images
    return Tensor(
        name="pixels and loss mask", shape=(pixels + tokens,), dtype="fp32", formula="4·(3·H·W·n + s·b)", made_in=MODEL_PATH
    )


@lru_cache(maxsize=CACHED_ENDS)
def encoder_input(vision: VisionSpec, encoder: EndInputs, tokens: int) -> tuple[Module, ...]:
    """The modules from the pixels to the input of the first layer: patches, class tokens, positions and a norm.

    `encoder`: `ModuleInputs.of_part("vision")`. `tokens`: of the text of a microbatch, whose loss mask is stored beside the pixels.
    """
    shapes = Shapes(encoder)
    class_tokens = (_class_tokens(vision, shapes),) if vision.class_tokens else ()
    embedded: tuple[Module, ...] = (_patches(vision, shapes, tokens), *class_tokens, _positions(vision, shapes))
    if vision.is_radio:
        embedded = (embedder(vision, shapes), positions(vision, shapes), *class_tokens)
    parts = (
        *embedded,
        *((_norm(shapes, "ln_pre"),) if vision.kind in _CLIP else ()),
        Module(
            name=f"{MODEL}.tokens",
            kind=ModuleKind.VISION_INPUT,
            function=True,
            forward_workspace=(tokens_of(shapes, "tokens by image"), shapes.hidden("tokens")),
            backward_workspace=(shapes.hidden(OUTPUT_GRADIENT), tokens_of(shapes, "input gradient")),
            source="CLIPViTModel.forward",
        ),
    )
    return tuple(with_part(each, "vision") for each in parts)


def tokens_of(shapes: Shapes, name: str, *, made_in: str = "", count: int | None = None) -> Tensor:
    """[n, s, h]: the tokens of the encoder, or `count` of each tile."""
    shape = (shapes.b, shapes.s if count is None else count, shapes.model.hidden_size)
    return Tensor(name=name, shape=shape, dtype=shapes.dtype, formula=f"{DTYPE_BYTES[shapes.dtype]}·s·n·h", made_in=made_in)


def _patches(vision: VisionSpec, shapes: Shapes, tokens: int) -> Module:
    """A convolution whose kernel and stride are a patch. Only its weight needs the images in backward."""
    width, dtype = shapes.model.hidden_size, shapes.dtype
    weight = (width, _CHANNELS, vision.patch, vision.patch)
    in_16_bit = dtype != "fp32"
    read = of_images(vision, shapes.b, IMAGES, dtype) if in_16_bit else pixels_and_mask(vision, shapes.b, tokens)
    bias = (Parameter(name="bias", shape=(width,), dtype=dtype),) if vision.kind not in _CLIP else ()
    return Module(
        name=f"{MODEL}.conv1",
        kind=ModuleKind.PATCHES,
        parameters=(Parameter(name="weight", shape=weight, dtype=dtype), *bias),
        saved=(replace(read, for_weight=True),),
        forward_workspace=(tokens_of(shapes, "patches", count=vision.patches),),
        backward_workspace=(
            tokens_of(shapes, OUTPUT_GRADIENT, count=vision.patches),
            Tensor(name="weight gradient", shape=weight, dtype=dtype, formula="size of the weight", for_weight=True),
        ),
        source="torch.nn.Conv2d",
    )


def _class_tokens(vision: VisionSpec, shapes: Shapes) -> Module:
    """Learned tokens, which are copied before those of the patches."""
    shape: tuple[int, ...] = (1, vision.class_tokens, shapes.model.hidden_size)
    shape = shape[1:] if vision.is_radio else shape
    unused = (Parameter(name="mask_token", shape=(1, shapes.model.hidden_size), dtype=shapes.dtype),)
    return Module(
        name=f"{MODEL}.class_tokens",
        kind=ModuleKind.CLASS_TOKENS,
        function=True,
        parameters=(
            *(unused if vision.kind == "radio-g" else ()),
            Parameter(name="class_token", shape=shape, dtype=shapes.dtype),
        ),
        forward_workspace=(tokens_of(shapes, "patches", count=vision.patches), tokens_of(shapes, "tokens")),
        backward_workspace=(tokens_of(shapes, OUTPUT_GRADIENT),),
        source="CLIPViTModel.forward",
    )


def _positions(vision: VisionSpec, shapes: Shapes) -> Module:
    """The lookup of all positions, whose ids are a buffer of the model, and the sum of both."""
    table = (vision.tokens, shapes.model.hidden_size)
    ids = Tensor(name="position ids", shape=(vision.tokens,), dtype="int64", formula="8·s")
    return Module(
        name=f"{MODEL}.position_embeddings",
        kind=ModuleKind.POSITION_EMBEDDINGS,
        parameters=(Parameter(name="weight", shape=table, dtype=shapes.dtype),),
        referenced=(ids,),
        forward_workspace=(
            tokens_of(shapes, "tokens"),
            Tensor(name="positions", shape=table, dtype=shapes.dtype, formula="size of the weight"),
            tokens_of(shapes, "sum"),
        ),
        backward_workspace=(
            tokens_of(shapes, OUTPUT_GRADIENT),
            Tensor(name="sum over the tiles", shape=table, dtype=shapes.dtype, formula="size of the weight"),
            Tensor(name="weight gradient", shape=table, dtype=shapes.dtype, formula="size of the weight", for_weight=True),
        ),
        source="torch.nn.Embedding",
    )


def _norm(shapes: Shapes, name: str) -> Module:
    """A norm of all tokens, [n, s, h]."""
    width = shapes.model.hidden_size
    return Module(
        name=f"{MODEL}.{name}",
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, width),
        saved=(
            tokens_of(shapes, "input", made_in=f"{MODEL_PATH}{MODEL}"),
            *norm_statistics(shapes, shapes.s * shapes.b, "4·s·n"),
        ),
        forward_workspace=(tokens_of(shapes, "output"),),
        backward_workspace=(
            tokens_of(shapes, OUTPUT_GRADIENT),
            tokens_of(shapes, "input gradient"),
            *partial_sums(shapes, width),
        ),
        source="TENorm",
    )


@lru_cache(maxsize=CACHED_ENDS)
def encoder_output(vision: VisionSpec, encoder: EndInputs) -> tuple[Module, ...]:
    """The output of the last layer by image, a norm of SigLIP, and the copy of the tokens that the projector reads."""
    shapes = Shapes(encoder)
    kept = tokens_of(shapes, "tokens for the projector", count=vision.projected_tokens)
    if vision.pixel_shuffle:
        kept = replace(kept, shape=(*kept.shape[:2], vision.projector_input))
    by_image = Module(
        name=f"{MODEL}.output",
        kind=ModuleKind.VISION_OUTPUT,
        function=True,
        forward_workspace=(shapes.hidden("output of the last layer"), tokens_of(shapes, "output by image")),
        backward_workspace=(tokens_of(shapes, OUTPUT_GRADIENT), shapes.hidden("gradient of the last layer")),
        source="CLIPViTModel.forward",
    )
    copied = Module(
        name="projector_input",
        kind=ModuleKind.VISION_OUTPUT,
        function=True,
        forward_workspace=(tokens_of(shapes, "output by image"), kept),
        backward_workspace=(replace(kept, name=OUTPUT_GRADIENT), tokens_of(shapes, "input gradient")),
        source="LLaVAModel.forward",
    )
    last = vision.kind in ("siglip", "radio-g")
    order = ModuleKind.FINAL_NORM if vision.is_radio else ModuleKind.NORM
    parts = (by_image, *((replace(_norm(shapes, "ln_post"), kind=order),) if last else ()), copied)
    return tuple(with_part(each, "vision") for each in parts)


@lru_cache(maxsize=CACHED_ENDS)
def projector(vision: VisionSpec, inputs: EndInputs, *, reads_frozen: bool) -> Module:
    """Two linear layers and an activation, or one linear layer whose output is gathered, and the sum with the bias.

    `inputs`: `ModuleInputs.of_part("projector")`. `reads_frozen`: the encoder is frozen.
    """
    shapes = Shapes(inputs)
    wide = Shapes(replace(inputs, model=replace(inputs.model, hidden_size=vision.projector_input)))
    output = replace(shapes.hidden("output"), name="output with bias")
    biased = shapes.model.bias_linear
    parts = _affine(shapes, wide) if vision.affine_projector else _mlp(vision, shapes, wide)
    if reads_frozen and (vision.affine_projector or not vision.normed_projector):
        parts = (without_input_gradient(parts[0]), *parts[1:])
    encoder = Module(name="encoder", kind=ModuleKind.FEED_FORWARD, children=parts, source="megatron.core.transformer.mlp.MLP")
    children: tuple[Module, ...] = (parts[0],) if vision.affine_projector else (encoder,)
    add = Module(
        name="bias_add",
        kind=ModuleKind.OTHER,
        function=True,
        forward_workspace=(shapes.hidden(_PROJECTED), output),
        source="MultimodalProjector.forward",
    )
    module = Module(
        name=PROJECTOR,
        children=(*children, *((add,) if biased else ())),
        source="megatron.core.models.vision.multimodal_projector.MultimodalProjector",
    )
    return with_part(module, "projector")


def _mlp(vision: VisionSpec, shapes: Shapes, wide: Shapes) -> tuple[Module, ...]:
    model = shapes.model
    width = model.ffn_hidden_size // shapes.t
    gates = 2 if model.gated else 1
    first = column_parallel(
        wide,
        "linear_fc1",
        ModuleKind.FC1,
        width=gates * width,
        full_width=gates * model.ffn_hidden_size,
        symbol="2·f/t" if model.gated else "f/t",
        bias=model.bias_linear,
        fused_norm=vision.normed_projector,
        input_made_in=MODEL_PATH,
    )
    second = row_parallel(
        shapes,
        "linear_fc2",
        ModuleKind.FC2,
        width=width,
        full_width=model.ffn_hidden_size,
        symbol="f/t",
        bias=model.bias_linear,
        input_made_in="mlp",
    )
    gradient = tuple(replace(each, shares="") for each in second.backward_workspace)  # there is no residual stream
    between = activation(shapes, width=width, wide=gates * width)
    return tuple(_moved(each) for each in (first, between, replace(second, backward_workspace=gradient)))


def _affine(shapes: Shapes, wide: Shapes) -> tuple[Module, ...]:
    """One column-parallel layer with `gather_output`."""
    h = shapes.model.hidden_size
    linear = column_parallel(
        wide,
        "encoder",
        ModuleKind.FC1,
        width=h // shapes.t,
        full_width=h,
        symbol="h/t",
        bias=shapes.model.bias_linear,
        fused_norm=False,
        input_made_in=MODEL_PATH,
    )
    if shapes.t == 1:
        return (linear,)
    gathered = (shapes.hidden("outputs of all ranks"), shapes.hidden("gathered output"))
    return (
        replace(
            linear,
            forward_workspace=largest(linear.forward_workspace, gathered),
            collectives=(*linear.collectives, *shapes.tp("all_gather", "forward")),
        ),
    )


def _moved(module: Module) -> Module:
    """The module with its tensors allocated in the MLP of the projector."""
    saved = tuple(replace(each, made_in=_MADE_IN.get(each.made_in, each.made_in)) for each in module.saved)
    return replace(module, saved=saved)
