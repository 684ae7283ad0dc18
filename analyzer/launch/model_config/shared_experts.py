"""MoE families of 2024 and 2025, most with shared experts: from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/{ernie4_5_moe,hunyuan_v1_moe,dots1,solar_open,granitemoe,
granitemoeshared,llama4,olmoe,minimax_m2}/ of transformers 5.24.0.
"""

from __future__ import annotations

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    Option,
    Part,
    dropout,
    embeddings,
    gate,
    llama_model,
    rms_norm,
    rope,
    rotary_model,
    sizes,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.dense import with_head_size
from analyzer.launch.model_config.experts import Experts, balancing, deepseek_experts, mtp_note, sigmoid_router
from analyzer.launch.model_config.llama_like import without_positions


def ernie_moe(config: Configuration) -> MegatronModel:
    """ERNIE 4.5 with experts in a range of layers. Softmax scores with a correction bias."""
    if config.flag("use_bias", False):
        raise config.not_expressible("a bias in its output layer")
    count, width = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size", 1536)
    first, every = config.optional("moe_layer_start_index") or 0, config.integer("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    last = count - 1 if not isinstance(last, int) or last < 0 else last
    shared = config.optional("moe_num_shared_experts")
    experts = Experts(
        count=config.integer("moe_num_experts", 64),
        topk=config.integer("moe_k", 6),
        ffn=width,
        layers=tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(count)),
        shared=None if shared is None else shared * width,
    )
    gated, notes = gate(config)
    return rotary_model(
        config,
        sizes(with_head_size(config, config.integer("hidden_size") // config.integer("num_attention_heads"))),
        gated,
        rms_norm(config, default=1e-5),
        rope(config),
        [("--disable-bias-linear",)],
        embeddings(config, tied=True),
        dropout(attention=0, hidden=0),
        experts.options(),
        sigmoid_router(config),
        balancing(config),
        notes=(
            *notes,
            f"{config.name}: sigmoid scores stand for its softmax scores; Megatron-LM has no correction bias for these.",
        ),
    )


def hunyuan_moe(config: Configuration) -> MegatronModel:
    """Hunyuan-A13B: norms of q and k, one shared expert of the width of the others."""
    topk = config.get("moe_topk", 1)
    chosen = topk if isinstance(topk, list) else [topk]
    if not chosen or any(each != chosen[0] for each in chosen):
        raise config.not_expressible("other numbers of chosen experts in some layers")
    width = config.integer("intermediate_size")
    experts = Experts(
        count=config.integer("num_experts"),
        topk=Configuration({"moe_topk": chosen[0]}, config.name).integer("moe_topk"),
        ffn=width,
        layers=(True,) * config.integer("num_hidden_layers"),
        shared=width,
    )
    return llama_model(config, experts.options(), normed=[QK_NORMS, *rms_norm(config, default=1e-5)])


def dots(config: Configuration) -> MegatronModel:
    """dots.llm1: norms of q and k, experts as in DeepSeek-V3."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds and config.optional("sliding_window"):
        raise config.not_expressible("sliding windows in a part of its MoE layers")
    return _deepseek_experts(config, [("--qk-layernorm",)], groups=32, experts=deepseek_experts(config))


def solar(config: Configuration) -> MegatronModel:
    """Solar Open: experts as in DeepSeek-V3 in every layer."""
    width = config.integer("moe_intermediate_size")
    values = {"intermediate_size": width, "first_k_dense_replace": 0, **config.values, "head_dim": config.integer("head_dim", 128)}
    config = Configuration(values, config.name)
    experts = Experts(
        count=config.integer("n_routed_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn=width,
        layers=(True,) * config.integer("num_hidden_layers"),
        shared=width * config.integer("n_shared_experts", 1),
    )
    return _deepseek_experts(config, [], groups=8, experts=experts)


def _deepseek_experts(config: Configuration, norms: list[Option], *, groups: int, experts: Experts) -> MegatronModel:
    return llama_model(
        config,
        experts.options(),
        sigmoid_router(config),
        sized=sizes(config, groups=config.integer("num_key_value_heads", groups)),
        normed=[*norms, *rms_norm(config)],
        notes=mtp_note(config),
    )


def granite_moe(config: Configuration) -> MegatronModel:
    """Granite 3 with experts in every layer, and with a shared one if it has a width."""
    experts = Experts(
        count=config.integer("num_local_experts", 8),
        topk=config.integer("num_experts_per_tok", 2),
        ffn=config.integer("intermediate_size"),
        layers=(True,) * config.integer("num_hidden_layers"),
        shared=config.optional("shared_intermediate_size"),
    )
    note = f"{config.name}: its multipliers are left out; they change values, not memory."
    return llama_model(config, experts.options(), balancing(config), notes=(note,))


def llama4(config: Configuration) -> MegatronModel:
    """Llama 4: one expert for each token and a shared one, in all or every other layer; norms of q and k without weights."""
    count, width = config.integer("num_hidden_layers"), config.integer("intermediate_size", 8192)
    every = config.integer("interleave_moe_layer_step", 1)
    chosen = config.integers("moe_layers") or range(every - 1, count, every)
    experts = Experts(
        count=config.integer("num_local_experts", 16),
        topk=config.integer("num_experts_per_tok", 1),
        ffn=width,
        layers=tuple(layer in chosen for layer in range(count)),
        shared=width,
    )
    notes: tuple[str, ...] = (without_positions(config),)
    chunk = config.optional("attention_chunk_size")
    if chunk is not None:
        notes += (
            f"{config.name}: attention in chunks of {chunk} tokens in most layers is counted as attention to all tokens, "
            "which has the same memory and takes longer for longer sequences.",
        )
    width_of_dense = config.integer("intermediate_size_mlp", 16384)
    return llama_model(
        config,
        experts.options(),
        [("--moe-router-score-function", "sigmoid"), ("--moe-apply-probs-on-input",)],
        balancing(config),
        sized=sizes(with_head_size(config, 128), groups=config.integer("num_key_value_heads", 8), ffn=width_of_dense),
        normed=[*([("--qk-l2-norm",)] if config.flag("use_qk_norm", True) else []), *rms_norm(config, default=1e-5)],
        notes=notes,
    )


def olmoe(config: Configuration) -> MegatronModel:
    """OLMoE: norms of q and k over all heads, experts in every layer."""
    experts = _every_layer(config, count=config.integer("num_experts", 64), width=config.integer("intermediate_size"))
    router: list[Option] = [] if config.flag("norm_topk_prob", False) else [("--moe-router-pre-softmax",)]
    return _norms_over_heads(config, [*experts.options(), *router, *balancing(config)])


def minimax_m2(config: Configuration) -> MegatronModel:
    """MiniMax-M2: norms of q and k over all heads, sigmoid scores with a correction bias, rotary positions in half of each head."""
    config = with_head_size(config, 128)
    head, rotated = config.integer("head_dim"), config.optional("rotary_dim")
    experts = _every_layer(config, count=config.integer("num_local_experts", 256), width=config.integer("intermediate_size"))
    options = [*experts.options(), *sigmoid_router(config), *balancing(config)]
    share = 1.0 if rotated is None else rotated / head
    model = _norms_over_heads(config, options, rotated=rope(config, share=share), linear=NO_BIASES)
    if config.flag("use_mtp", False):
        model = model.noting(f"{config.name}: its MTP layers are left out, as in the model class of Hugging Face.")
    return model


def _every_layer(config: Configuration, *, count: int, width: int) -> Experts:
    layers = (True,) * config.integer("num_hidden_layers")
    return Experts(count=count, topk=config.integer("num_experts_per_tok", 8), ffn=width, layers=layers)


def _norms_over_heads(
    config: Configuration, options: list[Option], *, rotated: list[Option] | None = None, linear: Part | None = None
) -> MegatronModel:
    """A model with norms of q and k over all heads, for which those of Megatron-LM over each head stand."""
    heads, layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    groups = config.integer("num_key_value_heads", heads)
    head = config.integer("head_dim", config.integer("hidden_size") // heads)
    missing = layers * head * (heads + groups - 2)
    note = (
        f"{config.name} has norms of q and k over all heads, and Megatron-LM over each head: {missing:,} parameters are not "
        "counted."
    )
    return llama_model(config, options, normed=[QK_NORMS, *rms_norm(config)], rotated=rotated, linear=linear, notes=(note,))
