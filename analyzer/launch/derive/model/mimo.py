"""The MIMO models of examples/mimo/train.py: their sizes are those of the model provider, not of the options.

Sources: examples/mimo/train.py, configs/llava_vlm.py, model_providers/{llava_vlm,hf_clip_encoder}.py and
data/energon_vlm_task_encoder.py (core 0.19).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.vision import check_optimizer, combined_length, kernel_of
from analyzer.launch.derive.reading import option, positive, required, text
from analyzer.specs import ModelSpec, VisionSpec
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.specs import ParallelSpec

_PROVIDER: Final = "llava_vlm"
_OTHERS: Final = {
    "mock": "train.py builds llava_vlm and llava_avlm only",
    "video_llava_vlm": "train.py builds llava_vlm and llava_avlm only",
}
"""Providers that the script names and refuses."""
_IMAGE, _PATCH = 336, 14
_IMAGE_TOKENS: Final = (_IMAGE // _PATCH) ** 2
_PACKED_TO: Final = 64
"""Samples are padded to a multiple of this many tokens before they are packed."""


def _check_provider(arguments: Arguments) -> None:
    provider = text(arguments, "model_provider", "mock")
    if provider in _OTHERS:
        raise InputError("--model-provider", f"{provider}: {_OTHERS[provider]}", f"use {_PROVIDER}")
    if provider != _PROVIDER:
        raise UnsupportedError("--model-provider", f"the MIMO model {provider} is not modelled", f"use {_PROVIDER}")


def mimo_shape(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    """The sizes of Vicuna-7B, and the length of text and images (`--total-seq-length`)."""
    arguments = launch.arguments
    _check_provider(arguments)
    length = combined_length(required(arguments, "total_seq_length", "2048"), parallel)
    launch.assume(
        f"The language model is Vicuna-7B and the encoder CLIP ViT-L/14, both frozen, as the provider {_PROVIDER} builds them: "
        f"sizes of the launch have no effect. A sample has {length} tokens, the maximum (--total-seq-length)."
    )
    return replace(
        shape,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=128,
        max_position_embeddings=4096,
        seq_length=length,
    )


def mimo_model(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, *, length: int) -> ModelSpec:
    """Vicuna-7B with CLIP and a projector of two layers, of which only the projector is trained."""
    arguments = launch.arguments
    check_optimizer(arguments)
    if parallel.tensor > 1:  # the provider leaves the size in the configuration at 1
        named = option(arguments, "tensor_model_parallel_size")
        raise UnsupportedError(f"{named} {parallel.tensor}", "is not modelled for MIMO models", "use 1")
    language = _vicuna(model)
    vision = _clip(launch, language, images=_images(arguments, length), length=length)
    return replace(language, vision=vision, frozen=("vision_model", "language_model"))


def _vicuna(model: ModelSpec) -> ModelSpec:
    """The language model."""
    return replace(
        model,
        position_embedding="rope",
        rotary_percent=1.0,
        rope_fusion=True,
        normalization="RMSNorm",
        activation="swiglu",
        bias_linear=False,
        bias_qkv=False,
        tied_embeddings=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        qk_layernorm=False,
        cross_entropy="unfused",
        fp16_lm_cross_entropy=False,
    )


def _clip(launch: LaunchInput, language: ModelSpec, *, images: int, length: int) -> VisionSpec:
    """The encoder and the projector, for samples of `images` images and `length` tokens."""
    encoder = replace(
        language,
        num_layers=24,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=64,
        position_embedding="none",
        rope_fusion=False,
        normalization="LayerNorm",
        activation="gelu",
        bias_linear=True,
        bias_qkv=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    return VisionSpec(
        kind="hf_clip",
        encoder=replace(encoder, attention_backend=kernel_of(launch, encoder, head_dim=64)),
        projector=replace(
            language,
            ffn_hidden_size=4096,
            position_embedding="none",
            normalization="LayerNorm",
            activation="gelu",
            bias_linear=True,
        ),
        projector_input=1024,
        normed_projector=False,
        image_height=_IMAGE,
        image_width=_IMAGE,
        patch=_PATCH,
        class_tokens=1,
        drops_class_tokens=True,
        tiles=images,
        text_length=length - images * _IMAGE_TOKENS,
    )


def _images(arguments: Arguments, length: int) -> int:
    """Images of a sample: one, or with packing as many samples as fit, at most those of the buffer."""
    if length <= _IMAGE_TOKENS:
        fault = f"{length} tokens are not more than the {_IMAGE_TOKENS} of an image"
        raise InputError("--total-seq-length", fault, "use a larger one, such as 2048")
    buffer = positive(arguments, "packing_buffer_size")
    if buffer is None:
        return 1
    return max(1, min(buffer, length // round_up(_IMAGE_TOKENS + 1, _PACKED_TO)))
