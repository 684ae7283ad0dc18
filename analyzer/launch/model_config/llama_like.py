"""Dense families whose layers are those of Llama with few changes: from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/{seed_oss,smollm3,arcee,hunyuan_v1_dense,ernie4_5,ministral,ministral3,
stablelm,glm4,exaone4}/ of transformers 5.24.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    Option,
    attention_biases,
    biases,
    dropout,
    embeddings,
    gate,
    layer_norm,
    llama_model,
    no_gate,
    rms_norm,
    rope,
    rotary_model,
    sizes,
    window,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.dense import qwen2, with_head_size
from analyzer.launch.model_config.experts import mtp_note
from analyzer.specs.vision_part import ModelParts


def seed_oss(config: Configuration) -> MegatronModel:
    """Seed-OSS: biases of q, k and v, and none in the output projection of attention."""
    inputs, output = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
    if output and not inputs:
        raise config.not_expressible("a bias in the output projection of its attention alone")
    kind: Literal["none", "qkv", "all"] = "all" if output else "qkv" if inputs else "none"
    return llama_model(
        config,
        sized=sizes(with_head_size(config, 128), groups=config.integer("num_key_value_heads", 8)),
        linear=biases(config, attention=kind, ffn=config.flag("mlp_bias", False)),
        attention_dropout=0.1,
        hidden_dropout=config.number("residual_dropout", 0.1),
    )


def smollm3(config: Configuration) -> MegatronModel:
    """SmolLM3: no rotary positions in every fourth layer."""
    if config.flag("use_sliding_window", False):
        raise config.not_expressible("sliding windows in a part of its layers")
    return llama_model(
        config,
        sized=sizes(config, groups=config.integer("num_key_value_heads", 4)),
        linear=biases(config, attention=attention_biases(config), ffn=config.flag("mlp_bias", False)),
        tied=True,
        notes=(without_positions(config),),
    )


def without_positions(config: Configuration) -> str:
    """The note about layers without rotary positions."""
    return f"{config.name}: rotary positions are counted in all layers; a part of its layers has none."


def arcee(config: Configuration) -> MegatronModel:
    """Arcee: squared ReLU without a gate."""
    return llama_model(
        config,
        activation=no_gate(config, "hidden_act", default="relu2"),
        normed=rms_norm(config, default=1e-5),
        linear=biases(config, attention=attention_biases(config), ffn=config.flag("mlp_bias", False)),
    )


def hunyuan_dense(config: Configuration) -> MegatronModel:
    """Hunyuan: norms of q and k in each head, after the rotary positions."""
    return llama_model(config, normed=[QK_NORMS, *rms_norm(config, default=1e-5)])


def ernie(config: Configuration) -> MegatronModel:
    """ERNIE 4.5, without experts: one flag for all biases."""
    gated, notes = gate(config)
    return rotary_model(
        config,
        sizes(with_head_size(config, 128), groups=config.integer("num_key_value_heads", 2)),
        gated,
        rms_norm(config, default=1e-5),
        rope(config),
        [] if config.flag("use_bias", False) else [("--disable-bias-linear",)],
        embeddings(config, tied=True),
        dropout(attention=0, hidden=0),
        notes=notes,
    )


def ministral(config: Configuration) -> MegatronModel:
    """Ministral, Ministral 3 and the language model of Mistral Small 3: windows in the layers that layer_types names, or in all."""
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    named = isinstance(kinds, list) and len(kinds) == count
    layers = tuple(kind == "sliding_attention" for kind in kinds) if isinstance(kinds, list) and named else (True,) * count
    return llama_model(
        config,
        window(config, layers, size=config.optional("sliding_window")),
        sized=sizes(config, groups=config.integer("num_key_value_heads", 8)),
        normed=rms_norm(config, default=1e-5),
        linear=NO_BIASES,
    )


def glm4(config: Configuration) -> MegatronModel:
    """GLM-4 of April 2025 and GLM-Z1: norms after attention and FFN too, biases of q, k and v, and half of each head is rotated."""
    model = llama_model(
        config,
        [("--rotary-interleaved",)],
        sized=sizes(with_head_size(config, 128), groups=config.integer("num_key_value_heads", 2)),
        normed=rms_norm(config, default=1.5625e-7),
        rotated=rope(config, share=0.5),
        linear=biases(config, attention="qkv" if config.flag("attention_bias", True) else "none", ffn=False),
    )
    return replace(model, parts=ModelParts(variant="GLM-4"))


def mimo(config: Configuration) -> MegatronModel:
    """MiMo: Qwen 2 with an MTP layer."""
    return qwen2(config).noting(*mtp_note(config))


def stablelm(config: Configuration) -> MegatronModel:
    """StableLM 2: LayerNorm, a gate, rotary positions in a quarter of each head."""
    if config.flag("qk_layernorm", False):
        raise config.not_expressible("norms of q and k with other weights in each head")
    if config.flag("use_parallel_residual", False):
        raise config.not_expressible("one norm for parallel attention and FFN")
    linear: list[Option] = [("--disable-bias-linear",)]
    if config.flag("use_qkv_bias", False):
        linear.append(("--add-qkv-bias",))
    return llama_model(
        config,
        normed=layer_norm(config, key="layer_norm_eps"),
        rotated=rope(config, share=0.25),
        linear=(linear, ()),
        hidden_dropout=config.number("hidden_dropout", 0),
    )


def exaone4(config: Configuration) -> MegatronModel:
    """EXAONE 4 without windows: norms after attention and FFN in place of those before them, and of q and k in each head."""
    kinds = config.get("layer_types")
    windowed = "sliding_attention" in kinds if isinstance(kinds, list) else False
    if windowed or "sliding_window" not in config.values or config.optional("sliding_window") is not None:
        raise config.not_expressible("rotary positions in a part of its layers")
    model = llama_model(config, [QK_NORMS], linear=NO_BIASES)
    return replace(model, parts=ModelParts(variant="EXAONE 4"))
