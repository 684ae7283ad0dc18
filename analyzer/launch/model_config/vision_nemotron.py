"""The parts of Nemotron Nano VL and Nemotron 3 Omni for images and sound: RADIO, and in Omni Parakeet.

Source: `RADIOViTModel` of megatron-core 0.19 (core/models/vision/radio.py) with the sizes that models/nemotron_omni and
models/nemotron_vl of Megatron-Bridge give it (August 2026), `MultimodalProjector`, and `ParakeetEncoder` of transformers 5.12.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.vision_parts import COLUMN, ROW, linear, norm
from analyzer.specs.vision_part import VisionWeight

_LAYERS: Final = 32
_HIDDEN: Final = 1280
_FFN: Final = 5120
_PATCH: Final = 16
_LARGEST_IMAGE: Final = 2048
_SHUFFLED: Final = 4
"""Neighboring tokens that the projection reads as one."""


def nemotron(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """RADIO ViT-H in modules of Megatron with a projection of two layers, and the same for sound with the module of Parakeet.

    `class_tokens` is 10 in Omni. Nano VL has 16.
    """
    pixels = 3 * _PATCH**2
    yield from linear("vision_model.embedder", _HIDDEN, pixels, bias=False, split=COLUMN)
    video = config.nested("vision_config") if config.table("vision_config") else config
    if video.flag("separate_video_embedder", False):
        frames = video.integer("video_temporal_patch_size", 2)
        yield from linear("vision_model.video_embedder", _HIDDEN, pixels * frames, bias=False, split=COLUMN)
    yield VisionWeight(name="vision_model.position_embeddings", shape=(1, (_LARGEST_IMAGE // _PATCH) ** 2, _HIDDEN))
    tokens = config.integer("class_tokens", 16 if config.model_type == "NemotronH_Nano_VL_V2" else 10)
    yield VisionWeight(name="vision_model.class_token", shape=(tokens, _HIDDEN))
    layer = "vision_model.decoder.layers.*"
    for norm_name in ("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm"):
        yield from norm(f"{layer}.{norm_name}", _HIDDEN, copies=_LAYERS)
    yield from linear(f"{layer}.self_attention.linear_qkv", 3 * _HIDDEN, _HIDDEN, copies=_LAYERS, split=COLUMN)
    yield from linear(f"{layer}.self_attention.linear_proj", _HIDDEN, _HIDDEN, copies=_LAYERS, split=ROW)
    yield from linear(f"{layer}.mlp.linear_fc1", _FFN, _HIDDEN, copies=_LAYERS, split=COLUMN)
    yield from linear(f"{layer}.mlp.linear_fc2", _HIDDEN, _FFN, copies=_LAYERS, split=ROW)
    projected = config.integer("projector_hidden_size", 20480)
    yield from _projection("vision_projection", _SHUFFLED * _HIDDEN, projected, width)
    if config.table("sound_config"):
        yield from (replace(each, part="sound") for each in _sound(config.nested("sound_config"), width))


def _projection(name: str, inputs: int, hidden: int, width: int) -> Iterator[VisionWeight]:
    yield from norm(f"{name}.encoder.linear_fc1.layer_norm", inputs, bias=False)
    yield from linear(f"{name}.encoder.linear_fc1", hidden, inputs, bias=False, split=COLUMN)
    yield from linear(f"{name}.encoder.linear_fc2", width, hidden, bias=False, split=ROW)


def _sound(sound: Configuration, width: int) -> Iterator[VisionWeight]:
    """Parakeet, complete on each tensor-parallel rank: convolutions, and Conformer layers with a convolution each."""
    hidden, depth = sound.integer("hidden_size", 1024), sound.integer("num_hidden_layers", 24)
    heads, ffn = sound.integer("num_attention_heads", 8), sound.integer("intermediate_size", 4096)
    channels, factor = sound.integer("subsampling_conv_channels", 256), sound.integer("subsampling_factor", 8)
    kernel, biased = sound.integer("conv_kernel_size", 9), sound.flag("convolution_bias", False)
    halvings, place = factor.bit_length() - 1, 0
    yield from linear("sound_model.encoder.subsampling.layers.0", channels, 1, window=(3, 3))
    for _ in range(halvings - 1):
        place += 2
        yield from linear(f"sound_model.encoder.subsampling.layers.{place}", channels, 1, window=(3, 3))
        place += 1
        yield from linear(f"sound_model.encoder.subsampling.layers.{place}", channels, channels, window=(1, 1))
    bins = sound.integer("num_mel_bins", 128)
    for _ in range(halvings):
        bins = (bins + 1) // 2
    yield from linear("sound_model.encoder.subsampling.linear", hidden, channels * bins)
    layer = "sound_model.encoder.layers.*"
    for name in ("feed_forward1", "feed_forward2"):
        yield from linear(f"{layer}.{name}.linear1", ffn, hidden, copies=depth, bias=biased)
        yield from linear(f"{layer}.{name}.linear2", hidden, ffn, copies=depth, bias=biased)
    for name in ("bias_u", "bias_v"):
        yield VisionWeight(name=f"{layer}.self_attn.{name}", shape=(heads, hidden // heads), copies=depth)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from linear(f"{layer}.self_attn.{name}", hidden, hidden, copies=depth, bias=biased)
    yield from linear(f"{layer}.self_attn.relative_k_proj", hidden, hidden, copies=depth, bias=False)
    yield from linear(f"{layer}.conv.pointwise_conv1", 2 * hidden, hidden, copies=depth, bias=biased, window=(1,))
    yield from linear(f"{layer}.conv.depthwise_conv", hidden, 1, copies=depth, bias=biased, window=(kernel,))
    yield from linear(f"{layer}.conv.pointwise_conv2", hidden, hidden, copies=depth, bias=biased, window=(1,))
    for name in ("conv.norm", "norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out"):
        yield from norm(f"{layer}.{name}", hidden, copies=depth)
    yield from _projection("sound_projection", hidden, sound.integer("projection_hidden_size", 4096), width)
