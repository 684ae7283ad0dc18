"""Layers of the plugins of slime (`--spec slime_plugins…`): weights that the options of Megatron-LM do not give.

Source: slime_plugins/models/{qwen3_5,qwen3_next,hf_attention}.py and slime_plugins/models/glm5/glm5.py of slime, August 2026. Their
sizes are those of the configuration in `--hf-checkpoint`. It is read for published models; of others the weights are not counted.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.forks.launch_options import LaunchOptions
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.latent import index_layers
from analyzer.launch.model_config.linear import linear_layers, text_model
from analyzer.launch.model_config.published import published_configuration
from analyzer.specs.attention import PluginLayers

SPEC: Final = "--spec"
_GLM_5: Final = "slime_plugins.models.glm5.glm5"
_LINEAR: Final = ("slime_plugins.models.qwen3_5", "slime_plugins.models.qwen3_next")
"""Plugins whose linear attention is a copy of that of transformers, complete on each rank, which reads the complete sequence."""


def plugin_layers(launch: LaunchOptions) -> PluginLayers | None:
    """The weights of the plugin of the launch; None for another plugin, or without the configuration of its model."""
    plugin = launch.word(SPEC) or ""
    if plugin != _GLM_5 and plugin not in _LINEAR:
        return None
    found = published_configuration(launch.word("--hf-checkpoint") or "")
    if found is None:
        return None
    config, _ = text_model(found)
    same = (launch.maybe_integer("--num-layers"), launch.maybe_integer("--hidden-size"))
    if same != (config.integer("num_hidden_layers"), config.integer("hidden_size")):
        return None
    return _indexers(plugin, config) if plugin == _GLM_5 else _delta_nets(plugin, config)


def _indexers(plugin: str, config: Configuration) -> PluginLayers | None:
    """`DSAMLASelfAttention`: multi-latent attention with an indexer, except in layers that reuse the keys of another layer."""
    if config.model_type != "glm_moe_dsa":
        return None
    heads, width = config.integer("index_n_heads", 32), config.integer("index_head_dim", 128)
    hidden, rank = config.integer("hidden_size"), config.integer("q_lora_rank")
    return PluginLayers(
        plugin=plugin,
        described="indexers",
        layers=index_layers(config),
        weights=(
            ("wq_b.weight", (heads * width, rank)),
            ("wk.weight", (width, hidden)),
            ("k_norm.weight", (width,)),
            ("k_norm.bias", (width,)),
            ("weights_proj.weight", (heads, hidden)),
        ),
        replaces=False,
        summed=True,
        counted_as="those of dense multi-latent attention",
        shares_keys=not all(index_layers(config)),
    )


def _delta_nets(plugin: str, config: Configuration) -> PluginLayers | None:
    """`Qwen3_5GatedDeltaNet` and `Qwen3NextGatedDeltaNet`, with the norm before them. They differ in how projections are joined."""
    if not config.model_type.startswith(("qwen3_5", "qwen3_next")):
        return None
    hidden = config.integer("hidden_size")
    keys = config.integer("linear_num_key_heads", 16) * config.integer("linear_key_head_dim", 128)
    heads, head = config.integer("linear_num_value_heads", 32), config.integer("linear_value_head_dim", 128)
    values, kernel = heads * head, config.integer("linear_conv_kernel_dim", 4)
    return PluginLayers(
        plugin=plugin,
        described="linear attention",
        layers=linear_layers(config),
        weights=(
            ("linear_attn.dt_bias", (heads,)),
            ("linear_attn.A_log", (heads,)),
            ("linear_attn.conv1d.weight", (2 * keys + values, 1, kernel)),
            ("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)),
            ("linear_attn.in_proj_ba.weight", (2 * heads, hidden)),
            ("linear_attn.norm.weight", (head,)),
            ("linear_attn.out_proj.weight", (hidden, values)),
            ("input_layernorm.weight", (hidden,)),
        ),
        replaces=True,
        summed=False,
    )
