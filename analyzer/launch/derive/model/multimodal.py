"""The models of examples/multimodal/train.py: a language model and a vision encoder by their names.

Sources: examples/multimodal/{train,model,config,layer_specs,layer_scaling,nvlm/internvit,radio/radio_g}.py (core 0.19).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Final, Literal

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.vision import check_optimizer, combined_length, frozen_parts, image_size, kernel_of
from analyzer.launch.derive.reading import option, positive, required, switched_on, text
from analyzer.specs import Activation, ModelSpec, NormModules, VisionEncoder, VisionSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.specs import ParallelSpec

_TAG_TOKENS: Final = {
    "llama3p1": 5,
    "chatml": 5,
    "qwen2p0": 5,
    "qwen2p5": 5,
    "nemotron5": 6,
    "nemotron5-aligned": 6,
}
"""Tokens of a tile tag for each `--tokenizer-prompt-format` that has tags (`get_num_image_embeddings`, from core 0.12 on)."""
_SINGLE_DIGITS: Final = 10
"""The largest number of tiles with which a tag of Qwen has no further digit."""
_MOST_TILES: Final = 12
"""The largest number of tiles with tags (`_get_tile_tags`)."""


@dataclass(frozen=True, kw_only=True)
class _Language:
    """What `get_language_model_config` and `get_vision_projection_config` set for a language model."""

    ffn: int
    activation: Activation = "swiglu"
    qkv_bias: bool = False
    projector_ffn: int | None = None
    """None for that of the language model."""
    projector_activation: Activation = "gelu"
    projector_bias: bool = False
    projector_norm: Literal["LayerNorm", "none"] | None = None
    """None for the norm of the launch."""


_LANGUAGES: Final[dict[str, _Language]] = {
    "llama3_8b": _Language(ffn=14336),
    "llama3.1_8b": _Language(ffn=14336, projector_ffn=4096, projector_bias=True, projector_norm="LayerNorm"),
    "mistral_7b": _Language(ffn=14336, projector_norm="none"),
    "yi-34b": _Language(ffn=20480, projector_norm="LayerNorm"),
    "qwen2.0_72B": _Language(ffn=29568, qkv_bias=True, projector_norm="LayerNorm"),
    "qwen2.5_7B": _Language(ffn=18944, qkv_bias=True, projector_ffn=3584),
    "qwen2.5_72B": _Language(ffn=29568, qkv_bias=True, projector_norm="LayerNorm"),
    "llama3.2_1b": _Language(ffn=8192, projector_ffn=2048, projector_norm="LayerNorm"),
    "llama_nemotron_8b": _Language(ffn=14336, projector_bias=True, projector_norm="LayerNorm"),
    "nemotron5-8b": _Language(ffn=21504, activation="squared_relu", projector_activation="squared_relu"),
}
_REFUSED_LANGUAGES: Final = {
    "llama3.1_70B": "config.py has no projector for it",
}


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """What `get_vision_model_config` sets for an encoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    head: int | None
    """None for that of the launch."""
    class_tokens: int
    activation: Activation = "gelu"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_modules: NormModules = "engine"
    scaled: bool = False
    padded: bool = False
    """Heads are added until tensor-parallel ranks have equal numbers of them."""
    no_dropout: bool = True
    """Without dropout of hidden states. Otherwise the launch says it."""
    no_attention_dropout: bool = True

    def heads_of(self, tensor: int) -> int:
        """The heads for a tensor-parallel size."""
        return ((self.heads - 1) // tensor + 1) * tensor if self.padded else self.heads


_ENCODERS: Final[dict[VisionEncoder, _Encoder]] = {
    "clip": _Encoder(layers=24, hidden=1024, ffn=4096, heads=16, head=64, class_tokens=1),
    "siglip": _Encoder(layers=27, hidden=1152, ffn=4304, heads=16, head=72, class_tokens=0),
    "internvit": _Encoder(
        layers=45,
        hidden=3200,
        ffn=12800,
        heads=25,
        head=None,
        class_tokens=1,
        normalization="RMSNorm",
        norm_modules="unfused",
        scaled=True,
        padded=True,
    ),
    "internvit300M": _Encoder(
        layers=24,
        hidden=1024,
        ffn=4096,
        heads=16,
        head=64,
        class_tokens=1,
        norm_modules="torch",
        scaled=True,
        no_attention_dropout=False,
    ),
    "radio": _Encoder(
        layers=32, hidden=1280, ffn=5120, heads=16, head=80, class_tokens=8, no_dropout=False, no_attention_dropout=False
    ),
    "radio-g": _Encoder(
        layers=40,
        hidden=1536,
        ffn=4096,
        heads=24,
        head=64,
        class_tokens=5,
        activation="swiglu",
        scaled=True,
        no_dropout=False,
        no_attention_dropout=False,
    ),
    "cradio-g": _Encoder(
        layers=40, hidden=1536, ffn=6144, heads=24, head=64, class_tokens=8, no_dropout=False, no_attention_dropout=False
    ),
}


def _language(arguments: Arguments) -> _Language:
    named, name = option(arguments, "language_model_type"), text(arguments, "language_model_type", "")
    if not name:
        raise InputError(named, "is required by examples/multimodal/train.py", f"give one of {', '.join(_LANGUAGES)}")
    if name in _REFUSED_LANGUAGES:
        raise InputError(named, f"{name}: {_REFUSED_LANGUAGES[name]}", "use another model")
    if name not in _LANGUAGES:
        raise UnsupportedError(f"{named} {name}", "this language model is not modelled", f"use one of {', '.join(_LANGUAGES)}")
    return _LANGUAGES[name]


def _encoder(arguments: Arguments) -> tuple[VisionEncoder, _Encoder]:
    named, name = option(arguments, "vision_model_type"), text(arguments, "vision_model_type", "clip")
    for known, sizes in _ENCODERS.items():
        if name == known:
            return known, sizes
    raise UnsupportedError(f"{named} {name}", "this encoder is not modelled", f"use one of {', '.join(_ENCODERS)}")


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """Tokens of a sample."""

    tile: int
    """Of a tile in the language model, with its tag."""
    tiles: int
    text: int
    """Including one for the image."""


def _lengths(arguments: Arguments) -> _Lengths:
    """The largest sample: the maximum number of tiles, and as much text as fits."""
    height, width, patch = image_size(arguments)
    _, encoder = _encoder(arguments)
    kept = 0 if switched_on(arguments, "disable_vision_class_token") else encoder.class_tokens
    tile = (height // patch) * (width // patch) + kept
    if switched_on(arguments, "pixel_shuffle"):
        _check_shuffled(arguments, tile)
        tile //= 4
    tile += _tag_tokens(arguments)
    tiled = switched_on(arguments, "use_tiling")
    most = (positive(arguments, "max_num_tiles") or 1) + switched_on(arguments, "use_thumbnail") if tiled else 1
    tiles = max(most, positive(arguments, "num_frames") or 1)
    length = required(arguments, "decoder_seq_length", "4096")
    if length <= tiles * tile:
        fault = f"{length} tokens are not more than the {tiles * tile} of {tiles} tiles of an image"
        raise InputError(option(arguments, "decoder_seq_length"), fault, f"use {tiles * tile + 1} or more")
    given = positive(arguments, "dataloader_seq_length")
    words = length - tiles * tile + 1
    return _Lengths(tile=tile, tiles=tiles, text=min(given, words) if given else words)


def _check_shuffled(arguments: Arguments, tokens: int) -> None:
    """Raises InputError unless the tokens of a tile are a square with an even side (`pixel_shuffle` of llava_model.py)."""
    side = isqrt(tokens)
    if side * side != tokens or side % 2:
        fault = f"needs a square of tokens with an even side, and a tile has {tokens}"
        remedy = "add --disable-vision-class-token, or use square images with an even number of patches on each side"
        raise InputError(option(arguments, "pixel_shuffle"), fault, remedy)


def _tag_tokens(arguments: Arguments) -> int:
    """Tokens of the tag of a tile. Raises InputError where Megatron-LM has no tags."""
    if not switched_on(arguments, "use_tile_tags"):
        return 0
    named, tokenizer = option(arguments, "use_tile_tags"), text(arguments, "tokenizer_prompt_format", "")
    if tokenizer not in _TAG_TOKENS:
        fault = f"--tokenizer-prompt-format {tokenizer} has no tile tags (get_num_image_embeddings of Megatron-LM)"
        raise InputError(named, fault, f"leave it out, or use one of {', '.join(_TAG_TOKENS)}")
    tiles = positive(arguments, "max_num_tiles") or 1
    if tiles > _MOST_TILES:
        raise InputError(option(arguments, "max_num_tiles"), f"there are tags for at most {_MOST_TILES} tiles", "use 12 or fewer")
    if required(arguments, "micro_batch_size", "1") > 1:
        fault = "Megatron-LM applies tile tags to one image at a time"
        raise InputError(option(arguments, "micro_batch_size"), fault, "use 1, or leave --use-tile-tags out")
    return _TAG_TOKENS[tokenizer] + (tokenizer.startswith("qwen") and tiles > _SINGLE_DIGITS)


def multimodal_shape(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    """The sizes with the length of text and images."""
    arguments = launch.arguments
    language, lengths = _language(arguments), _lengths(arguments)
    longest = required(arguments, "decoder_seq_length", "4096")
    tokens = lengths.text - 1 + lengths.tiles * lengths.tile
    length = combined_length(longest if parallel.pipeline > 1 else tokens, parallel)
    launch.assume(
        f"Every sample is assumed to be the largest one: {lengths.tiles} tiles of {lengths.tile} tokens, and {lengths.text - 1} "
        f"tokens of text; a sequence of the language model has {length} tokens."
    )
    return replace(shape, seq_length=length, max_position_embeddings=longest, ffn_hidden_size=language.ffn)


def multimodal_model(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, *, length: int) -> ModelSpec:
    """The language model, the encoder and the projector that the launch names."""
    arguments = launch.arguments
    check_optimizer(arguments)
    if positive(arguments, "packing_buffer_size") is not None:
        named = option(arguments, "packing_buffer_size")
        raise UnsupportedError(named, "the number of images in a packed sample is not known", "leave it out")
    named, language = option(arguments, "vision_model_type"), _language(arguments)
    kind, sizes = _encoder(arguments)
    drops = switched_on(arguments, "disable_vision_class_token")
    if kind == "radio-g" and switched_on(arguments, "overlap_grad_reduce") and "vision_model" not in frozen_parts(arguments):
        fault = "fails with radio-g, whose mask token gets no gradient, so that its bucket is never reduced"
        raise InputError(option(arguments, "overlap_grad_reduce"), fault, "leave it out, or add --freeze-ViT")
    if drops and not sizes.class_tokens:
        raise InputError(option(arguments, "disable_vision_class_token"), f"{named} {kind} has no class token", "leave it out")
    unfused = {
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "rope_fusion": False,
        "attention_softmax_in_fp32": True,
    }
    base = replace(model, apply_query_key_layer_scaling=False, **unfused)  # type: ignore[arg-type]
    lengths = _lengths(arguments)
    vision = VisionSpec(
        kind=kind,
        encoder=_encoder_model(launch, base, sizes, parallel),
        projector=_projector(base, language),
        projector_input=sizes.hidden * (4 if switched_on(arguments, "pixel_shuffle") else 1),
        normed_projector=language.projector_norm != "none",
        image_height=image_size(arguments)[0],
        image_width=image_size(arguments)[1],
        patch=image_size(arguments)[2],
        class_tokens=sizes.class_tokens,
        drops_class_tokens=drops,
        pixel_shuffle=switched_on(arguments, "pixel_shuffle"),
        tag_tokens=_tag_tokens(arguments),
        tiles=lengths.tiles,
        text_length=length + 1 - lengths.tiles * lengths.tile,
        packed=parallel.context > 1,
        recompute="all" if switched_on(arguments, "recompute_vision") else "none",
        separate_fields=True,
    )
    activation = language.activation
    return replace(
        base,
        activation=activation,
        bias_linear=False,
        bias_qkv=language.qkv_bias or switched_on(arguments, "add_qkv_bias"),
        vision=vision,
        frozen=frozen_parts(arguments),
    )


def _encoder_model(launch: LaunchInput, base: ModelSpec, sizes: _Encoder, parallel: ParallelSpec) -> ModelSpec:
    heads, gathers = sizes.heads_of(parallel.tensor), sizes.norm_modules == "unfused"
    encoder = replace(
        base,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=sizes.head or base.kv_channels,
        position_embedding="none",
        normalization=sizes.normalization,
        norm_modules=sizes.norm_modules,
        layer_scaling=sizes.scaled,
        activation=sizes.activation,
        bias_linear=True,
        bias_qkv=not gathers,
        qk_layernorm=gathers,
        hidden_dropout=0.0 if sizes.no_dropout else base.hidden_dropout,
        attention_dropout=0.0 if sizes.no_attention_dropout else base.attention_dropout,
    )
    return replace(encoder, attention_backend=kernel_of(launch, encoder, head_dim=encoder.kv_channels))


def _projector(base: ModelSpec, language: _Language) -> ModelSpec:
    """Its layers are those of Transformer Engine in any case if it has a norm."""
    norm = language.projector_norm
    return replace(
        base,
        ffn_hidden_size=language.projector_ffn or language.ffn,
        position_embedding="none",
        activation=language.projector_activation,
        bias_linear=language.projector_bias,
        normalization="LayerNorm" if norm == "LayerNorm" else base.normalization,
        implementation=base.implementation if norm == "none" else "transformer_engine",
    )
