"""The weights of the parts of models of Hugging Face for images and sound, from `vision_config` and `audio_config`.

Source: the modules in src/transformers/models/{qwen2_vl,qwen2_5_vl,qwen3_vl,glm4v_moe,internvl,qwen2_5_omni,qwen3_omni_moe,
siglip,pixtral,mistral3} of transformers 5.24.0, with the defaults of their configuration classes. `InternVisionModel` of InternVL's
own code has the weights of InternVLVisionModel, with those of queries, keys and values in one matrix. Kimi K2.5: the code of its
repository, of which NVIDIA-NeMo/Automodel has a copy (nemo_automodel/components/models/kimi_k25_vl/model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.vision_nemotron import nemotron
from analyzer.launch.model_config.vision_parts import COLUMN, ROW, linear, norm
from analyzer.specs.vision_part import NEMOTRON, VisionWeight, VisionWeights


def vision_weights(config: Configuration, *, width: int) -> VisionWeights:
    """The weights of both parts. `width`: that of the language model. Raises InputError for fields that are missing."""
    kind = config.model_type
    read, projection = _FAMILIES[kind]
    return VisionWeights(model=config.name, model_type=kind, weights=tuple(read(config, width)), projection=projection)


def _patches(vision: Configuration, width: int, *, patch: int, bias: bool) -> Iterator[VisionWeight]:
    """The convolution that makes a token of each patch of two images or frames."""
    channels = vision.integer("in_channels", vision.integer("in_chans", 3))
    shape = (width, channels, vision.integer("temporal_patch_size", 2), patch, patch)
    yield VisionWeight(name="patch_embed.proj.weight", shape=shape)
    if bias:
        yield VisionWeight(name="patch_embed.proj.bias", shape=(width,))


def _merged(vision: Configuration) -> int:
    """Neighboring tokens that become one."""
    return vision.integer("spatial_merge_size", 2) ** 2


def _qwen2(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Qwen2-VL: `hidden_size` is the width of the language model, `embed_dim` that of the encoder."""
    del width
    vision = config.nested("vision_config")
    hidden, depth = vision.integer("embed_dim", 1280), vision.integer("depth", 32)
    yield from _patches(vision, hidden, patch=vision.integer("patch_size", 14), bias=False)
    yield from norm("blocks.*.norm1", hidden, copies=depth)
    yield from norm("blocks.*.norm2", hidden, copies=depth)
    yield from _attention(hidden, depth)
    ffn = int(hidden * vision.number("mlp_ratio", 4))
    yield from linear("blocks.*.mlp.fc1", ffn, hidden, copies=depth, split=COLUMN)
    yield from linear("blocks.*.mlp.fc2", hidden, ffn, copies=depth, split=ROW)
    yield from _qwen_merger(hidden, _merged(vision), vision.integer("hidden_size", 3584), bias=True)


def _attention(hidden: int, depth: int, *, separate: bool = False) -> Iterator[VisionWeight]:
    for name in ("q", "k", "v") if separate else ("qkv",):
        yield from linear(f"blocks.*.attn.{name}", hidden if separate else 3 * hidden, hidden, copies=depth, split=COLUMN)
    yield from linear("blocks.*.attn.proj", hidden, hidden, copies=depth, split=ROW)


def _qwen_merger(hidden: int, merged: int, outputs: int, *, bias: bool) -> Iterator[VisionWeight]:
    yield from norm("merger.ln_q", hidden, bias=bias)
    yield from linear("merger.mlp.0", hidden * merged, hidden * merged, split=COLUMN)
    yield from linear("merger.mlp.2", outputs, hidden * merged, split=ROW)


def _qwen2_5(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Qwen2.5-VL: RMSNorm and a gated FFN. In Qwen2.5-Omni queries, keys and values have a matrix each."""
    del width
    vision = config.nested("vision_config")
    hidden, depth, ffn = vision.integer("hidden_size"), vision.integer("depth", 32), vision.integer("intermediate_size", 3420)
    patch = vision.integer("patch_size", vision.integer("spatial_patch_size", 14))
    yield from _patches(vision, hidden, patch=patch, bias=False)
    yield from norm("blocks.*.norm1", hidden, copies=depth, bias=False)
    yield from norm("blocks.*.norm2", hidden, copies=depth, bias=False)
    yield from _attention(hidden, depth, separate=config.model_type == "qwen2_5_omni")
    yield from linear("blocks.*.mlp.gate_proj", ffn, hidden, copies=depth, split=COLUMN)
    yield from linear("blocks.*.mlp.up_proj", ffn, hidden, copies=depth, split=COLUMN)
    yield from linear("blocks.*.mlp.down_proj", hidden, ffn, copies=depth, split=ROW)
    yield from _qwen_merger(hidden, _merged(vision), vision.integer("out_hidden_size", 3584), bias=False)


def _qwen3(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Qwen3-VL: learned positions, and a merger for each layer whose outputs are added in the language model (deepstack).

    Qwen3-Omni has other names for the weights of the mergers.
    """
    del width
    vision = config.nested("vision_config")
    hidden, depth, ffn = vision.integer("hidden_size", 1152), vision.integer("depth", 27), vision.integer("intermediate_size", 4304)
    outputs, merged = vision.integer("out_hidden_size", 3584), hidden * _merged(vision)
    default = [] if config.model_type.startswith("qwen3_5") else [8, 16, 24]  # Qwen3.5 has no deepstack
    layers = vision.integers("deepstack_visual_indexes") if vision.get("deepstack_visual_indexes") is not None else default
    yield from _patches(vision, hidden, patch=vision.integer("patch_size", 16), bias=True)
    yield VisionWeight(name="pos_embed.weight", shape=(vision.integer("num_position_embeddings", 2304), hidden))
    yield from norm("blocks.*.norm1", hidden, copies=depth)
    yield from norm("blocks.*.norm2", hidden, copies=depth)
    yield from _attention(hidden, depth)
    yield from linear("blocks.*.mlp.linear_fc1", ffn, hidden, copies=depth, split=COLUMN)
    yield from linear("blocks.*.mlp.linear_fc2", hidden, ffn, copies=depth, split=ROW)
    omni = config.model_type == "qwen3_omni_moe"
    normed, first, second = ("ln_q", "mlp.0", "mlp.2") if omni else ("norm", "linear_fc1", "linear_fc2")
    deep = "merger_list.*" if omni else "deepstack_merger_list.*"
    for name, read, copies in (("merger", hidden, 1), (deep, merged, len(layers))):
        if copies:
            yield from norm(f"{name}.{normed}", read, copies=copies)
            yield from linear(f"{name}.{first}", merged, merged, copies=copies, split=COLUMN)
            yield from linear(f"{name}.{second}", outputs, merged, copies=copies, split=ROW)


def _glm(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """GLM-4.1V and 4.5V: the FFN of a block has the width of the outputs, that of the merger `intermediate_size`."""
    del width
    vision = config.nested("vision_config")
    hidden, depth, outputs = (
        vision.integer("hidden_size", 1536),
        vision.integer("depth", 24),
        vision.integer("out_hidden_size", 4096),
    )
    ffn, patch, merge = (
        vision.integer("intermediate_size", 13696),
        vision.integer("patch_size", 14),
        vision.integer("spatial_merge_size", 2),
    )
    positions = (vision.integer("image_size", 336) // patch) ** 2
    yield from _patches(vision, hidden, patch=patch, bias=True)
    yield VisionWeight(name="embeddings.position_embedding.weight", shape=(positions, hidden))
    yield from norm("post_conv_layernorm", hidden, bias=False)
    yield from norm("blocks.*.norm1", hidden, copies=depth, bias=False)
    yield from norm("blocks.*.norm2", hidden, copies=depth, bias=False)
    biased = vision.flag("attention_bias", False)
    yield from linear("blocks.*.attn.qkv", 3 * hidden, hidden, copies=depth, bias=biased)
    yield from linear("blocks.*.attn.proj", hidden, hidden, copies=depth, bias=False)
    for name, rows, columns in (("gate_proj", outputs, hidden), ("up_proj", outputs, hidden), ("down_proj", hidden, outputs)):
        yield from linear(f"blocks.*.mlp.{name}", rows, columns, copies=depth, bias=False)
    yield from norm("post_layernorm", hidden, bias=False)
    yield VisionWeight(name="downsample.weight", shape=(outputs, hidden, merge, merge))
    yield VisionWeight(name="downsample.bias", shape=(outputs,))
    yield from linear("merger.proj", outputs, outputs, bias=False)
    yield from norm("merger.post_projection_norm", outputs)
    for name, rows, columns in (("gate_proj", ffn, outputs), ("up_proj", ffn, outputs), ("down_proj", outputs, ffn)):
        yield from linear(f"merger.{name}", rows, columns, bias=False)


def _intern(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """InternVL: InternViT, and a projector of two layers that reads four neighboring tokens as one."""
    vision = config.nested("vision_config")
    hidden, depth = vision.integer("hidden_size", 1024), vision.integer("num_hidden_layers", 24)
    ffn = vision.integer("intermediate_size", 4096)
    patch, image = _side(vision, "patch_size", 14), _side(vision, "image_size", 448)
    norms = vision.text("norm_type", "layer_norm") != "rms_norm"
    biased = vision.flag("attention_bias", vision.flag("qkv_bias", False))
    yield VisionWeight(name="embeddings.cls_token", shape=(1, 1, hidden))
    yield VisionWeight(name="embeddings.position_embeddings", shape=(1, (image // patch) ** 2 + 1, hidden))
    yield VisionWeight(name="embeddings.patch_embeddings.weight", shape=(hidden, vision.integer("num_channels", 3), patch, patch))
    yield VisionWeight(name="embeddings.patch_embeddings.bias", shape=(hidden,))
    layer = "encoder.layer.*"
    yield from (VisionWeight(name=f"{layer}.lambda_{each}", shape=(hidden,), copies=depth) for each in (1, 2))
    for name in ("q_proj", "k_proj", "v_proj") if config.model_type == "internvl" else ("qkv",):
        rows = hidden if name != "qkv" else 3 * hidden
        yield from linear(f"{layer}.attention.{name}", rows, hidden, copies=depth, bias=biased)
    if vision.flag("use_qk_norm", vision.flag("qk_normalization", False)):
        for name in ("q_norm", "k_norm"):
            yield from norm(f"{layer}.attention.{name}", hidden, copies=depth, bias=False)
    yield from linear(f"{layer}.attention.projection_layer", hidden, hidden, copies=depth)
    yield from linear(f"{layer}.mlp.fc1", ffn, hidden, copies=depth)
    yield from linear(f"{layer}.mlp.fc2", hidden, ffn, copies=depth)
    for name in ("layernorm_before", "layernorm_after"):
        yield from norm(f"{layer}.{name}", hidden, copies=depth, bias=norms)
    merged = hidden * int(1 / config.share("downsample_ratio", 0.5)) ** 2
    yield from norm("projector.layer_norm", merged)
    yield from linear("projector.linear_1", width, merged)
    yield from linear("projector.linear_2", width, width)


def _siglip(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Gemma 3: SigLIP without its pooling head, and a projection that Megatron-Bridge splits (`Gemma3VLMultimodalProjector`)."""
    vision = config.nested("vision_config")
    if vision.flag("vision_use_head", False):
        raise config.not_expressible("a pooling head of its vision encoder")
    hidden, depth = vision.integer("hidden_size", 768), vision.integer("num_hidden_layers", 12)
    ffn, patch = vision.integer("intermediate_size", 3072), vision.integer("patch_size", 16)
    channels, positions = vision.integer("num_channels", 3), (vision.integer("image_size", 224) // patch) ** 2
    yield from linear("embeddings.patch_embedding", hidden, channels, window=(patch, patch))
    yield VisionWeight(name="embeddings.position_embedding.weight", shape=(positions, hidden))
    for name in ("layer_norm1", "layer_norm2"):
        yield from norm(f"encoder.layers.*.{name}", hidden, copies=depth)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from linear(f"encoder.layers.*.self_attn.{name}", hidden, hidden, copies=depth)
    yield from linear("encoder.layers.*.mlp.fc1", ffn, hidden, copies=depth)
    yield from linear("encoder.layers.*.mlp.fc2", hidden, ffn, copies=depth)
    yield from norm("post_layernorm", hidden)
    yield from norm("multi_modal_projector.mm_soft_embed_norm", hidden, bias=False)
    yield from linear("multi_modal_projector.proj", width, hidden, bias=False, split=COLUMN)


def _pixtral(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Mistral 3: Pixtral's encoder, and a projector that joins neighboring tokens before its two layers."""
    vision = config.nested("vision_config")
    hidden, depth = vision.integer("hidden_size", 1024), vision.integer("num_hidden_layers", 24)
    ffn, patch = vision.integer("intermediate_size", 4096), vision.integer("patch_size", 14)
    yield from linear("patch_conv", hidden, vision.integer("num_channels", 3), bias=False, window=(patch, patch))
    yield from norm("ln_pre", hidden, bias=False)
    layer = "transformer.layers.*"
    for name in ("attention_norm", "ffn_norm"):
        yield from norm(f"{layer}.{name}", hidden, copies=depth, bias=False)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from linear(f"{layer}.attention.{name}", hidden, hidden, copies=depth, bias=False)
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"{layer}.feed_forward.{name}", ffn, hidden, copies=depth, bias=False)
    yield from linear(f"{layer}.feed_forward.down_proj", hidden, ffn, copies=depth, bias=False)
    biased, read = config.flag("multimodal_projector_bias", False), config.get("vision_feature_layer")
    layers = len(read) if isinstance(read, list) else 1
    yield from norm("multi_modal_projector.norm", hidden, bias=False)
    merged = hidden * config.integer("spatial_merge_size", 2) ** 2
    yield from linear("multi_modal_projector.patch_merger.merging_layer", hidden, merged, bias=False)
    yield from linear("multi_modal_projector.linear_1", width, hidden * layers, bias=biased)
    yield from linear("multi_modal_projector.linear_2", width, width, bias=biased)


def _gemma4(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Gemma 4: an encoder with norms of queries and keys and a gated FFN, and a projection without biases."""
    vision = config.nested("vision_config")
    hidden, depth = vision.integer("hidden_size", 768), vision.integer("num_hidden_layers", 16)
    ffn, patch = vision.integer("intermediate_size", 3072), vision.integer("patch_size", 16)
    heads, head = vision.integer("num_attention_heads", 12), vision.integer("head_dim", 64)
    groups = vision.integer("num_key_value_heads", 12)
    positions = vision.integer("position_embedding_size", 10240)
    yield VisionWeight(name="patch_embedder.position_embedding_table", shape=(2, positions, hidden))
    yield from linear("patch_embedder.input_proj", hidden, 3 * patch**2, bias=False)
    layer = "encoder.layers.*"
    for name, count in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
        yield from linear(f"{layer}.self_attn.{name}.linear", head * count, hidden, copies=depth, bias=False)
    yield from linear(f"{layer}.self_attn.o_proj.linear", hidden, head * heads, copies=depth, bias=False)
    for name in ("q_norm", "k_norm"):
        yield from norm(f"{layer}.self_attn.{name}", head, copies=depth, bias=False)
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"{layer}.mlp.{name}.linear", ffn, hidden, copies=depth, bias=False)
    yield from linear(f"{layer}.mlp.down_proj.linear", hidden, ffn, copies=depth, bias=False)
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
        yield from norm(f"{layer}.{name}", hidden, copies=depth, bias=False)
    yield from linear("embed_vision.embedding_projection", width, hidden, bias=False)


def _moon(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """Kimi K2.5: MoonViT with learned positions, and a projection of two layers on neighboring tokens (modeling_kimi_k25.py)."""
    vision = config.nested("vision_config")
    hidden, depth = vision.integer("vt_hidden_size", 1152), vision.integer("vt_num_hidden_layers", 27)
    ffn, patch = vision.integer("vt_intermediate_size", 4304), vision.integer("patch_size", 14)
    rows, columns = vision.integer("init_pos_emb_height", 64), vision.integer("init_pos_emb_width", 64)
    yield from linear("patch_embed.proj", hidden, 3, window=(patch, patch))
    yield VisionWeight(name="patch_embed.pos_emb.weight", shape=(rows, columns, hidden))
    for name in ("norm0", "norm1"):
        yield from norm(f"encoder.blocks.*.{name}", hidden, copies=depth)
    yield from linear("encoder.blocks.*.wqkv", 3 * hidden, hidden, copies=depth)
    yield from linear("encoder.blocks.*.wo", hidden, hidden, copies=depth)
    yield from linear("encoder.blocks.*.mlp.fc0", ffn, hidden, copies=depth)
    yield from linear("encoder.blocks.*.mlp.fc1", hidden, ffn, copies=depth)
    yield from norm("encoder.final_layernorm", hidden)
    merged = hidden * 4
    yield from norm("mm_projector.pre_norm", hidden)
    yield from linear("mm_projector.proj.0", merged, merged)
    yield from linear("mm_projector.proj.2", width, merged)


def _side(vision: Configuration, key: str, default: int) -> int:
    """The height and width of an image or a patch. Raises UnsupportedError if they differ."""
    value = vision.get(key)
    if not isinstance(value, list):
        return vision.integer(key, default)
    sides = vision.integers(key)
    if len(set(sides)) != 1:
        raise vision.not_expressible(f"a {key} of {sides}")
    return sides[0]


def _qwen2_5_omni(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """The vision part of Qwen2.5-VL, and an encoder of sound as in Whisper whose outputs are projected."""
    yield from _qwen2_5(config, width)
    audio = config.nested("audio_config")
    hidden = audio.integer("d_model", 1280)
    convolutions = [
        *linear("conv1", hidden, audio.integer("num_mel_bins", 128), window=(3,)),
        *linear("conv2", hidden, hidden, window=(3,)),
        VisionWeight(name="audio_bos_eos_token.weight", shape=(2, audio.integer("output_dim", 3584))),
    ]
    yield from _of_sound(audio, hidden, convolutions, unbiased=("k_proj",))


def _qwen3_omni(config: Configuration, width: int) -> Iterator[VisionWeight]:
    """The vision part of Qwen3-VL, and an encoder of sound with two-dimensional convolutions and a projection of two layers."""
    yield from _qwen3(config, width)
    audio = config.nested("audio_config")
    hidden, channels = audio.integer("d_model", 1280), audio.integer("downsample_hidden_size", 480)
    bins = audio.integer("num_mel_bins", 128)
    for _ in range(3):  # each convolution halves the bins
        bins = (bins + 1) // 2
    convolutions = [
        *linear("conv2d1", channels, 1, window=(3, 3)),
        *linear("conv2d2", channels, channels, window=(3, 3)),
        *linear("conv2d3", channels, channels, window=(3, 3)),
        *linear("conv_out", hidden, channels * bins, bias=False),
        *linear("proj1", hidden, hidden),
    ]
    yield from _of_sound(audio, hidden, convolutions, projection="proj2")


def _of_sound(
    audio: Configuration,
    hidden: int,
    first: Sequence[VisionWeight],
    *,
    unbiased: tuple[str, ...] = (),
    projection: str = "proj",
) -> Iterator[VisionWeight]:
    """An encoder of sound: the weights before its layers, the layers, the last norm and the projection."""
    depth, ffn = audio.integer("encoder_layers", 32), audio.integer("encoder_ffn_dim", 5120)
    found = [*first]
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found += linear(f"layers.*.self_attn.{name}", hidden, hidden, copies=depth, bias=name not in unbiased)
    found += linear("layers.*.fc1", ffn, hidden, copies=depth)
    found += linear("layers.*.fc2", hidden, ffn, copies=depth)
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        found += norm(f"layers.*.{name}", hidden, copies=depth)
    found += norm("ln_post", hidden)
    found += linear(projection, audio.integer("output_dim", 3584), hidden)
    yield from (replace(each, name=f"audio_tower.{each.name}", part="sound") for each in found)


_Reader = Callable[[Configuration, int], Iterator[VisionWeight]]
_FAMILIES: Final[dict[str, tuple[_Reader, tuple[str, ...]]]] = {
    "qwen2_vl": (_qwen2, ("merger.",)),
    "qwen2_5_vl": (_qwen2_5, ("merger.",)),
    "qwen3_vl": (_qwen3, ("merger.", "deepstack_merger_list.")),
    "qwen3_vl_moe": (_qwen3, ("merger.", "deepstack_merger_list.")),
    "qwen3_5": (_qwen3, ("merger.",)),
    "qwen3_5_moe": (_qwen3, ("merger.",)),
    "glm4v": (_glm, ("merger.",)),
    "glm4v_moe": (_glm, ("merger.",)),
    "gemma3": (_siglip, ("multi_modal_projector.",)),
    "mistral3": (_pixtral, ("multi_modal_projector.",)),
    "gemma4": (_gemma4, ("embed_vision.",)),
    "kimi_k25": (_moon, ("mm_projector.",)),
    "internvl": (_intern, ("projector.",)),
    "internvl_chat": (_intern, ("projector.",)),
    "qwen2_5_omni": (_qwen2_5_omni, ("merger.", "audio_tower.proj.")),
    **dict.fromkeys(NEMOTRON, (nemotron, ("vision_projection.", "sound_projection."))),
    "qwen3_omni_moe": (_qwen3_omni, ("merger.", "merger_list.", "audio_tower.proj1.", "audio_tower.proj2.")),
}
"""By the model_type of the configuration, with the beginnings of the names of weights of the projection."""
