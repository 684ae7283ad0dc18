"""Families with linear attention in most layers: from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/{qwen3_next,qwen3_5,qwen3_5_moe}/ of transformers 5.24.0.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    Option,
    llama_model,
    pattern,
    rms_norm,
    rope,
    sizes,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.dense import with_head_size
from analyzer.launch.model_config.experts import Experts, balancing, qwen_layers

_LINEAR: Final = "linear_attention"
_INTERVAL: Final = 4
"""Default of `full_attention_interval`."""


def qwen3_next(config: Configuration) -> MegatronModel:
    """Qwen 3 Next: a gated delta net in three of four layers, gated attention in the others, and experts with shared ones."""
    router: list[Option] = [] if config.flag("norm_topk_prob", True) else [("--moe-router-pre-softmax",)]
    experts = Experts(
        count=config.integer("num_experts", 512),
        topk=config.integer("num_experts_per_tok", 10),
        ffn=config.integer("moe_intermediate_size", 512),
        layers=qwen_layers(config),
        shared=config.integer("shared_expert_intermediate_size", 512),
    )
    options = [*experts.options(), ("--moe-shared-expert-gate",), *router, *balancing(config)]
    return _gated_delta_net(config, options, ffn=config.integer("intermediate_size", 5632)).noting(_without_mtp(config))


def qwen3_5(config: Configuration) -> MegatronModel:
    """Qwen 3.5: the same layers with a dense FFN."""
    config, notes = text_model(config)
    return _gated_delta_net(config, [], ffn=config.integer("intermediate_size", 12288)).noting(*notes, _without_mtp(config))


def qwen3_5_moe(config: Configuration) -> MegatronModel:
    """Qwen 3.5 with experts in every layer."""
    config, notes = text_model(config)
    width = config.integer("moe_intermediate_size", 512)
    experts = Experts(
        count=config.integer("num_experts", 256),
        topk=config.integer("num_experts_per_tok", 8),
        ffn=width,
        layers=(True,) * config.integer("num_hidden_layers"),
        shared=config.integer("shared_expert_intermediate_size", 512),
    )
    options = [*experts.options(), ("--moe-shared-expert-gate",), *balancing(config)]
    return _gated_delta_net(config, options, ffn=width).noting(*notes, _without_mtp(config))


def _without_mtp(config: Configuration) -> str:
    """MTP layers are in the checkpoint, and not in the model class of transformers."""
    return f"{config.name}: its MTP layer is left out, as in the model class of Hugging Face; add --mtp-num-layers 1 for it."


def text_model(config: Configuration) -> tuple[Configuration, tuple[str, ...]]:
    """The language model of a configuration with a vision encoder, and a note about the encoder."""
    text = config.table("text_config")
    if not text:
        return config, ()
    tied = {"tie_word_embeddings": config.values["tie_word_embeddings"]} if "tie_word_embeddings" in config.values else {}
    return Configuration({**tied, **text}, config.name), (
        f"{config.name}: its vision encoder is left out; its memory is not counted.",
    )


def _gated_delta_net(config: Configuration, feed_forward: list[Option], *, ffn: int) -> MegatronModel:
    """A model with gated delta nets and gated attention. `feed_forward`: the options of its experts."""
    if config.flag("attention_bias", False):
        raise config.not_expressible("biases in its full attention and none in its linear attention")
    config = with_head_size(config, 256)
    return llama_model(
        config,
        [QK_NORMS, ("--attention-output-gate",)],
        _linear_attention(config),
        feed_forward,
        sized=sizes(config, groups=config.integer("num_key_value_heads", 2), ffn=ffn),
        normed=[*rms_norm(config), ("--apply-layernorm-1p",)],
        rotated=rope(config, share=0.25),
        linear=NO_BIASES,
    )


def _linear_attention(config: Configuration) -> list[Option]:
    """The sizes of the gated delta nets, and the layers that have them."""
    return [
        ("--experimental-attention-variant", "gated_delta_net"),
        ("--linear-attention-freq", _frequency(config)),
        ("--linear-num-key-heads", str(config.integer("linear_num_key_heads", 16))),
        ("--linear-num-value-heads", str(config.integer("linear_num_value_heads", 32))),
        ("--linear-key-head-dim", str(config.integer("linear_key_head_dim", 128))),
        ("--linear-value-head-dim", str(config.integer("linear_value_head_dim", 128))),
        ("--linear-conv-kernel-dim", str(config.integer("linear_conv_kernel_dim", 4))),
    ]


def _frequency(config: Configuration) -> str:
    """N if every N-th layer has full attention, otherwise a list."""
    every = config.integer("full_attention_interval", _INTERVAL)
    if not isinstance(config.get("layer_types"), list):
        return str(every)
    linear = linear_layers(config)
    every = linear.index(False) + 1 if not all(linear) else every
    return str(every) if linear == _periodic(len(linear), every) else pattern(linear)


def linear_layers(config: Configuration) -> tuple[bool, ...]:
    """For each layer, whether its attention is linear."""
    count, kinds = config.integer("num_hidden_layers"), config.get("layer_types")
    if not isinstance(kinds, list):
        return _periodic(count, config.integer("full_attention_interval", _INTERVAL))
    if len(kinds) != count:
        raise config.not_expressible(f"{len(kinds)} layer_types for {count} layers")
    return tuple(kind == _LINEAR for kind in kinds)


def _periodic(count: int, every: int) -> tuple[bool, ...]:
    """All but every N-th layer."""
    return tuple(layer % every != 0 for layer in range(1, count + 1))
