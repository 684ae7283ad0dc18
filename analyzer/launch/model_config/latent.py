"""Families with multi-latent attention, DeepSeek-V2, V3, V3.2, Moonlight, Kimi K2 and GLM-5: to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/deepseek_v2, deepseek_v3 of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.launch.model_config.common import (
    NO_BIASES,
    MegatronModel,
    Option,
    llama_model,
    rope,
    sizes,
    yarn_scaling,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.experts import deepseek_experts, mtp_note, routing_groups, sigmoid_router
from analyzer.specs.attention import layers_with_indexers


def deepseek_v2(config: Configuration) -> MegatronModel:
    """DeepSeek-V2 and V2-Lite: softmax scores."""
    pre = [] if config.flag("norm_topk_prob", False) else [("--moe-router-pre-softmax",)]
    return _deepseek(config, router=[*pre, *routing_groups(config)])


def deepseek_v3(config: Configuration) -> MegatronModel:
    """DeepSeek-V3, R1, Moonlight and Kimi K2: sigmoid scores with a correction bias."""
    return _deepseek(config, router=sigmoid_router(config))


def deepseek_sparse(config: Configuration) -> MegatronModel:
    """DeepSeek-V3.2 and GLM-5: an indexer chooses the keys of each query. Megatron-LM needs a coefficient for its loss."""
    if not config.values.get("mlp_layer_types"):
        config = Configuration({"first_k_dense_replace": 3, **config.values}, config.name)
    without_mtp = Configuration({**config.values, "num_nextn_predict_layers": 0}, config.name)
    model = _deepseek(without_mtp, router=sigmoid_router(config))
    shared = _shared_keys(config)
    if shared:  # needs core 0.19, which builds indexers in MTP layers
        model = model.noting(*mtp_note(config))
    elif mtp_note(config):
        model = model.noting(f"{config.name}: its MTP layer is left out; Megatron-LM stops in MTP layers with sparse attention.")
    options: list[Option] = [
        ("--experimental-attention-variant", "dsa"),
        ("--dsa-indexer-n-heads", str(config.integer("index_n_heads", 64))),
        ("--dsa-indexer-head-dim", str(config.integer("index_head_dim", 128))),
        ("--dsa-indexer-topk", str(config.integer("index_topk", 2048))),
        ("--dsa-indexer-loss-coeff", "0.01"),
        *shared,
    ]
    plain = tuple(option for option in model.options if option != ("--no-rope-fusion",))
    return replace(model, options=(*plain, ("--no-rope-fusion",), *options))


def _shared_keys(config: Configuration) -> list[Option]:
    """Which layers use the keys that another layer chose. Raises UnsupportedError for layers that are not periodic."""
    layers = index_layers(config)
    if all(layers):
        return []
    every, offset = config.integer("index_topk_freq", 1), config.optional("index_skip_topk_offset") or 0
    if layers != layers_with_indexers(len(layers), every=every, after=max(offset, 1)):
        raise config.not_expressible("layers that use the keys of another layer without a period")
    return [("--dsa-indexer-topk-freq", str(every)), ("--dsa-indexer-skip-topk-offset", str(offset))]


def index_layers(config: Configuration) -> tuple[bool, ...]:
    """For each layer of a model with sparse attention, whether it has an indexer, or uses the keys that a layer before it chose.

    `GlmMoeDsaConfig.__post_init__` of transformers 5.24.0; `is_dsa_skip_topk_layer` of megatron-core 0.19.0 is the same rule.
    """
    count, kinds = config.integer("num_hidden_layers"), config.get("indexer_types")
    if isinstance(kinds, list):
        if len(kinds) != count:
            raise config.not_expressible(f"{len(kinds)} indexer_types for {count} layers")
        return tuple(kind == "full" for kind in kinds)
    every, offset = config.integer("index_topk_freq", 1), config.optional("index_skip_topk_offset")
    first = 2 if "index_skip_topk_offset" not in config.values else offset or 0
    return layers_with_indexers(count, every=every, after=first)


def _deepseek(config: Configuration, *, router: list[Option]) -> MegatronModel:
    if config.flag("attention_bias", False):
        raise config.not_expressible("biases in its multi-latent attention")
    heads = config.integer("num_attention_heads")
    # latent attention does not use it; Megatron refuses heads that do not divide the hidden size without it
    head = config.integer("v_head_dim") if config.integer("hidden_size") % heads else None
    plain = Configuration({**config.values, "head_dim": head}, config.name)
    return llama_model(
        config,
        deepseek_experts(config).options(),
        router,
        sized=[*sizes(plain, groups=heads), *_latent_attention(config)],
        rotated=[*rope(config), *_scaling(config)],
        linear=NO_BIASES,
        notes=mtp_note(config),
    )


def _latent_attention(config: Configuration) -> list[Option]:
    """Ranks and head sizes. The norms of the compressed queries, keys and values are --qk-layernorm."""
    queries = config.optional("q_lora_rank")
    return [
        ("--multi-latent-attention",),
        *([] if queries is None else [("--q-lora-rank", str(queries))]),
        ("--kv-lora-rank", str(config.integer("kv_lora_rank"))),
        ("--qk-head-dim", str(config.integer("qk_nope_head_dim"))),
        ("--qk-pos-emb-head-dim", str(config.integer("qk_rope_head_dim"))),
        ("--v-head-dim", str(config.integer("v_head_dim"))),
        ("--qk-layernorm",),
    ]


def _scaling(config: Configuration) -> list[Option]:
    """YaRN, or rotary positions without it, for which Megatron-LM has no fused kernel here."""
    yarn = yarn_scaling(config)
    if yarn is None:
        return [("--rope-type", "rope"), ("--no-rope-fusion",)]
    return [
        ("--rope-type", "yarn"),
        ("--rotary-scaling-factor", f"{yarn.number('factor', 40):g}"),
        ("--mscale", f"{yarn.number('mscale', 1):g}"),
        ("--mscale-all-dim", f"{yarn.number('mscale_all_dim', 0):g}"),
    ]
