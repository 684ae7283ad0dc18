"""DeepSeek-V4: compressed attention and hyper-connections, to options of Megatron-LM and what these do not say.

Source of the fields: `DeepSeekV4Bridge` of Megatron-Bridge (models/deepseek/deepseek_v4_bridge.py), August 2026, and
src/transformers/models/deepseek_v4 of transformers 5.24.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.launch.model_config.common import NO_BIASES, MegatronModel, Option, llama_model, rope, sizes
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.experts import Experts, mtp_note, sigmoid_router
from analyzer.specs.attention import COMPRESSION, CompressedAttentionSpec, CompressedModel, HyperConnectionSpec
from analyzer.specs.vision_part import ModelParts

_NOTE: Final = "{}: options do not give its attention, residual stream and routing, which are in the branch dev of Megatron-LM."
_SCORES: Final = "sqrtsoftplus"
_LAYER_TYPES: Final = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a compressed key by the name that transformers has for the layer."""


def deepseek_v4(config: Configuration) -> MegatronModel:
    """DeepSeek-V4 Flash and Pro. All layers have experts; the scores of the router have the tensors of a sigmoid."""
    if config.text("scoring_func", _SCORES) != _SCORES:
        raise config.not_expressible(f"scores of the router other than {_SCORES}")
    kinds = config.get("mlp_layer_types")
    if config.optional("first_k_dense_replace") or (isinstance(kinds, list) and "dense" in kinds):
        raise config.not_expressible("layers without experts")
    layers, width, head = (config.integer(name) for name in ("num_hidden_layers", "moe_intermediate_size", "head_dim"))
    position = config.integer("qk_rope_head_dim", 64)
    experts = Experts(
        count=config.integer("n_routed_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn=width,
        layers=(True,) * layers,
        shared=config.integer("n_shared_experts", 1) * width,
    )
    latent: list[Option] = [
        ("--multi-latent-attention",),
        ("--q-lora-rank", str(config.integer("q_lora_rank"))),
        ("--kv-lora-rank", str(head)),
        ("--qk-head-dim", str(head - position)),
        ("--qk-pos-emb-head-dim", str(position)),
        ("--v-head-dim", str(head)),
        ("--qk-layernorm",),
        ("--rope-type", "yarn"),
    ]
    plain = Configuration({**config.values, "head_dim": None, "rope_scaling": None}, config.name)  # YaRN is in `latent`
    model = llama_model(
        plain,
        experts.options(),
        sigmoid_router(config),
        sized=[*sizes(plain, groups=config.integer("num_attention_heads"), ffn=width), *latent],
        rotated=rope(config),
        linear=NO_BIASES,
        notes=(*mtp_note(config), _NOTE.format(config.name)),
    )
    return replace(model, parts=ModelParts(compressed=_compressed(config)))


def _compressed(config: Configuration) -> CompressedModel:
    streams = config.integer("hc_mult", 4)
    return CompressedModel(
        attention=CompressedAttentionSpec(
            ratios=_ratios(config),
            head_dim=config.integer("head_dim"),
            q_lora_rank=config.integer("q_lora_rank"),
            output_groups=config.integer("o_groups"),
            output_rank=config.integer("o_lora_rank"),
            window=config.integer("sliding_window", 128),
            index_heads=config.integer("index_n_heads"),
            index_head_dim=config.integer("index_head_dim"),
            topk=config.integer("index_topk"),
            kernels=True,
        ),
        hyper_connections=HyperConnectionSpec(streams=streams, iterations=config.integer("hc_sinkhorn_iters", 20)),
        hash_layers=config.optional("num_hash_layers") or 0,
        layers=config.integer("num_hidden_layers"),
    )


def _ratios(config: Configuration) -> tuple[int, ...]:
    """For each layer and MTP layer. Raises UnsupportedError for other ratios, which Megatron-LM refuses."""
    layers, depths = config.integer("num_hidden_layers"), config.optional("num_nextn_predict_layers") or 0
    named = config.get("layer_types")
    if isinstance(named, list) and config.get("compress_ratios") is None:
        ratios = tuple(_LAYER_TYPES.get(str(each), -1) for each in named)
    else:
        ratios = tuple(config.integers("compress_ratios"))
    if not layers <= len(ratios) or depths > layers or not set(ratios) <= set(COMPRESSION.values()):
        raise config.not_expressible(f"{len(ratios)} compression ratios for {layers} layers, or others than 0, 4 and 128")
    return (*ratios, *(0,) * depths)[: layers + depths]
