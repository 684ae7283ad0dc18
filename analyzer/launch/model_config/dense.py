"""Dense model families with rotary positions: from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/*/modeling_*.py of transformers 5.23.0.
"""

from __future__ import annotations

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    attention_biases,
    biases,
    layer_norm,
    llama_model,
    no_gate,
    rms_norm,
    rope,
    sizes,
    window,
)
from analyzer.launch.model_config.configuration import GELU, Configuration


def llama(config: Configuration) -> MegatronModel:
    """Llama 1 to 3.3, and models with the same class."""
    return llama_model(config, linear=biases(config, attention=attention_biases(config), ffn=config.flag("mlp_bias", False)))


def granite(config: Configuration) -> MegatronModel:
    """Granite: Llama with multipliers of the embedding, the residual branches, attention and logits."""
    return llama(config).noting(f"{config.name}: its multipliers are left out; they change values, not memory.")


def mistral(config: Configuration) -> MegatronModel:
    """Mistral: every layer has the sliding window, 4096 tokens if the field is missing."""
    size = config.optional("sliding_window") if "sliding_window" in config.values else 4096
    layers = (True,) * config.integer("num_hidden_layers")
    return llama_model(
        config,
        window(config, layers, size=size),
        sized=sizes(config, groups=config.integer("num_key_value_heads", 8)),
        linear=NO_BIASES,
    )


def qwen2(config: Configuration) -> MegatronModel:
    """Qwen 1.5, 2 and 2.5: biases of q, k, v alone. Layers from max_window_layers on have a window if it is switched on."""
    return llama_model(config, _qwen_window(config), linear=([("--disable-bias-linear",), ("--add-qkv-bias",)], ()))


def _qwen_window(config: Configuration) -> list[tuple[str, ...]]:
    if not config.flag("use_sliding_window", False):
        return []
    count = config.integer("num_hidden_layers")
    first = config.get("max_window_layers", 28)
    layers = tuple(layer >= first for layer in range(count)) if isinstance(first, int) else (True,) * count
    return window(config, layers, size=config.optional("sliding_window"))


def qwen3(config: Configuration) -> MegatronModel:
    """Qwen 3: norms of q and k in each head, no biases. The head size is 128 if the field is missing."""
    config = with_head_size(config, 128)
    return llama_model(config, _qwen_window(config), normed=[QK_NORMS, *rms_norm(config)])


def with_head_size(config: Configuration, default: int) -> Configuration:
    """The configuration with the head size that its class has if the field is missing."""
    return Configuration({**config.values, "head_dim": config.integer("head_dim", default)}, config.name)


def gemma(config: Configuration) -> MegatronModel:
    """Gemma 1. The command line of Megatron-LM has no GELU gate; --quick-geglu has the same shapes."""
    activation = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    kind = "GELU" if activation in GELU else activation
    note = (
        f"{config.name}: --quick-geglu stands for its gate with {kind}, and its scaling of the embedding is left out; "
        "the shapes are equal."
    )
    return llama_model(
        with_head_size(config, 256),
        activation=([("--quick-geglu",)], (note,)),
        normed=[*rms_norm(config), ("--apply-layernorm-1p",)],
        linear=NO_BIASES,
        tied=True,
    )


def phi3(config: Configuration) -> MegatronModel:
    """Phi 3 and 4: every layer has the sliding window."""
    layers = (True,) * config.integer("num_hidden_layers")
    return llama_model(
        config,
        window(config, layers, size=config.optional("sliding_window")),
        normed=rms_norm(config, default=1e-5),
        linear=NO_BIASES,
        hidden_dropout=config.number("resid_pdrop", 0),
    )


def starcoder2(config: Configuration) -> MegatronModel:
    """StarCoder2: LayerNorm, GELU and biases."""
    layers = (True,) * config.integer("num_hidden_layers")
    return llama_model(
        config,
        window(config, layers, size=config.optional("sliding_window")),
        sized=sizes(config, groups=config.integer("num_key_value_heads", 2)),
        activation=no_gate(config, "hidden_act", default="gelu_pytorch_tanh"),
        normed=layer_norm(config, key="norm_epsilon"),
        linear=([], ()) if config.flag("use_bias", True) else NO_BIASES,
        tied=True,
        hidden_dropout=config.number("residual_dropout", 0),
    )


def nemotron(config: Configuration) -> MegatronModel:
    """Nemotron-4 and Minitron: squared ReLU, and LayerNorm with a weight around zero."""
    return llama_model(
        config,
        activation=no_gate(config, "hidden_act", default="relu2"),
        normed=[*layer_norm(config, key="norm_eps"), ("--apply-layernorm-1p",)],
        rotated=rope(config, share=0.5),
        linear=biases(config, attention=attention_biases(config), ffn=config.flag("mlp_bias", False)),
    )
