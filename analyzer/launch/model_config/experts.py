"""MoE families with ordinary attention: from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/*/modeling_*.py of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    Option,
    biases,
    llama_model,
    pattern,
    rms_norm,
    rope,
    sizes,
    window,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.dense import with_head_size


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model, under the names that its family uses."""

    count: int
    topk: int
    ffn: int
    layers: tuple[bool, ...]
    """For each layer whether it has experts."""
    shared: int | None = None
    """Total width of the shared experts."""

    def options(self) -> list[Option]:
        """Options of Megatron-LM."""
        options: list[Option] = [
            ("--num-experts", str(self.count)),
            ("--moe-router-topk", str(self.topk)),
            ("--moe-ffn-hidden-size", str(self.ffn)),
        ]
        if not all(self.layers):
            options.append(("--moe-layer-freq", pattern(self.layers)))
        if self.shared is not None:
            options.append(("--moe-shared-expert-intermediate-size", str(self.shared)))
        return options


def balancing(config: Configuration) -> list[Option]:
    """The coefficient of the load-balancing loss, if the configuration has one."""
    coefficient = config.number("router_aux_loss_coef", 0)
    return [("--moe-aux-loss-coeff", f"{coefficient:g}")] if coefficient else []


def mixtral(config: Configuration) -> MegatronModel:
    """Mixtral: every layer has experts."""
    layers = (True,) * config.integer("num_hidden_layers")
    experts = Experts(
        count=config.integer("num_local_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn=config.integer("intermediate_size"),
        layers=layers,
    )
    return llama_model(
        config,
        window(config, layers, size=config.optional("sliding_window")),
        experts.options(),
        balancing(config),
        sized=sizes(config, groups=config.integer("num_key_value_heads", 8)),
        normed=rms_norm(config, default=1e-5),
        linear=NO_BIASES,
    )


def qwen_moe(config: Configuration) -> MegatronModel:
    """Qwen 1.5 and 2 MoE: biases of q, k, v, and shared experts with a gate. Qwen 3 MoE: norms of q and k."""
    third = config.model_type in ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
    config = with_head_size(config, 128) if third else config
    if config.flag("use_sliding_window", False):
        raise config.not_expressible("sliding windows in a part of its MoE layers")
    experts = Experts(
        count=config.integer("num_experts", config.optional("num_local_experts")),
        topk=config.integer("num_experts_per_tok"),
        ffn=config.integer("moe_intermediate_size"),
        layers=qwen_layers(config),
        shared=None if third else config.integer("shared_expert_intermediate_size"),
    )
    return llama_model(
        config,
        [QK_NORMS] if third else [("--add-qkv-bias",)] if config.flag("qkv_bias", True) else [],
        experts.options(),
        [] if third else [("--moe-shared-expert-gate",)],
        [] if config.flag("norm_topk_prob", False) else [("--moe-router-pre-softmax",)],
        balancing(config),
        linear=NO_BIASES,
    )


def qwen_layers(config: Configuration) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, without those in mlp_only_layers."""
    excluded = set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", 1)
    return tuple(i not in excluded and (i + 1) % step == 0 for i in range(config.integer("num_hidden_layers")))


def gpt_oss(config: Configuration) -> MegatronModel:
    """gpt-oss: biases everywhere, also in experts and router; a learned sink in each head; windows in every other layer."""
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        windowed = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        windowed = tuple(layer % 2 == 0 for layer in range(count))
    experts = Experts(
        count=config.integer("num_local_experts"),
        topk=config.integer("num_experts_per_tok", 4),
        ffn=config.integer("intermediate_size"),
        layers=(True,) * count,
    )
    if not config.flag("attention_bias", True):
        raise config.not_expressible("biases in its experts and none in its attention")
    config.activation("hidden_act", default="silu")  # the model class does not use it
    clamp = f"{config.number('swiglu_limit', 7):g}"
    return llama_model(
        config,
        [("--no-bias-dropout-fusion",), ("--softmax-type", "learnable")],
        window(config, windowed, size=config.optional("sliding_window")),
        experts.options(),
        sized=sizes(with_head_size(config, 64), groups=config.integer("num_key_value_heads", 8)),
        activation=([("--quick-geglu",), ("--activation-func-clamp-value", clamp), ("--glu-linear-offset", "1")], ()),
        normed=rms_norm(config, default=1e-5),
        linear=([], ()),
    )


def glm4_moe(config: Configuration) -> MegatronModel:
    """GLM-4.5 to 4.7: biases of q, k, v alone, shared experts, sigmoid scores with a correction bias."""
    return llama_model(
        config,
        deepseek_experts(config).options(),
        sigmoid_router(config),
        sized=sizes(with_head_size(config, 128), groups=config.integer("num_key_value_heads", 8)),
        normed=[*([QK_NORMS] if config.flag("use_qk_norm", False) else []), *rms_norm(config, default=1e-5)],
        rotated=rope(config, share=0.5),
        linear=biases(config, attention="qkv" if config.flag("attention_bias", False) else "none", ffn=False),
        notes=mtp_note(config),
    )


def deepseek_experts(config: Configuration) -> Experts:
    """Experts with the names of DeepSeek: the first layers are dense, and from then on every moe_layer_freq-th has experts."""
    width = config.integer("moe_intermediate_size")
    shared = config.optional("n_shared_experts")
    first, every = config.optional("first_k_dense_replace") or 0, config.integer("moe_layer_freq", 1)
    layers = tuple(i >= first and i % every == 0 for i in range(config.integer("num_hidden_layers")))
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        if len(kinds) != len(layers):
            raise config.not_expressible(f"{len(kinds)} mlp_layer_types for {len(layers)} layers")
        layers = tuple(kind == "sparse" for kind in kinds)
    return Experts(
        count=config.integer("n_routed_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn=width,
        layers=layers,
        shared=None if shared is None else shared * width,
    )


def sigmoid_router(config: Configuration) -> list[Option]:
    """The router of DeepSeek-V3 and GLM-4.5: sigmoid scores in fp32 with a correction bias."""
    return [
        ("--moe-router-score-function", "sigmoid"),
        ("--moe-router-enable-expert-bias",),
        ("--moe-router-dtype", "fp32"),
        *routing_groups(config),
    ]


def routing_groups(config: Configuration) -> list[Option]:
    """Groups of experts, and the factor of the scores."""
    options: list[Option] = []
    groups, best = config.optional("n_group"), config.optional("topk_group")
    if groups is not None and best is not None and groups > 1:
        options += [("--moe-router-num-groups", str(groups)), ("--moe-router-group-topk", str(best))]
    factor = config.number("routed_scaling_factor", 1)
    return options if factor == 1 else [*options, ("--moe-router-topk-scaling-factor", f"{factor:g}")]


def mtp_note(config: Configuration) -> tuple[str, ...]:
    """MTP layers are in the checkpoint, and not in the model class of transformers."""
    layers = config.optional("num_nextn_predict_layers")
    if layers is None:
        return ()
    return (
        f"{config.name}: its MTP layer is left out, as in the model class of Hugging Face; add --mtp-num-layers {layers} for it.",
    )
