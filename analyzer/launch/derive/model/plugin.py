"""Attention with weights whose activations are not modelled: that of plugins, and the sparse attention of core 0.19 and later.

Megatron: `get_dsa_module_spec_for_backend` and `_validate_dsa_index_share_pipeline_split`
(core/models/gpt/experimental_attention_variant_module_specs.py), `TransformerConfig.__post_init__`, `DSAttention` and `DSAIndexer`
(core/transformer/experimental_attention_variant/dsa.py), 0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.model.sparse_attention import index_sizes
from analyzer.launch.derive.reading import option, positive, since, switched_on
from analyzer.specs.plugin import PluginLayers, layers_with_indexers
from analyzer.specs.rules.stages import stage_violations
from analyzer.specs.stage_sizes import layers_of_stages

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import MlaSpec, ModelSpec, ParallelSpec, TrainingJob

_VARIANT: Final = "experimental_attention_variant"
_FREQUENCY: Final = "dsa_indexer_topk_freq"
_OFFSET: Final = "dsa_indexer_skip_topk_offset"


def with_plugin(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the weights of a plugin, or of the indexers of core 0.19, in its attention, and what is not counted of it."""
    plugin = launch.arguments.parts.plugin or _of_core(launch.arguments, job)
    if plugin is None:
        return job
    _check_stages(launch.arguments, plugin, job)
    count = sum(plugin.layers)
    said = f"The weights of the {plugin.described} of {plugin.plugin} are counted in {count} of {len(plugin.layers)} layers."
    launch.assume(said)
    job = replace(job, model=replace(job.model, plugin=plugin))
    if plugin.in_mtp:  # gathered keys are only supported with sparse attention; dense attention exchanges them
        job = replace(job, parallel=replace(job.parallel, cp_comm_type="p2p"))
    if plugin.counted_as:
        return replace(job, withheld=(*job.withheld, plugin.reason))
    return replace(job, not_counted=(*job.not_counted, plugin.reason))


def _of_core(arguments: Arguments, job: TrainingJob) -> PluginLayers | None:
    """The indexers of core 0.19 and later; None without them, and in releases whose sparse attention is modelled."""
    if arguments.get(_VARIANT) != "dsa" or not since(arguments, "0.19"):
        return None
    _refuse(arguments, job)
    model, mla = job.model, job.model.mla
    assert mla is not None
    sizes = index_sizes(arguments)
    every, offset = positive(arguments, _FREQUENCY) or 1, _offset(arguments)
    return PluginLayers(
        plugin="DSAttention of Megatron-LM",
        described="indexers",
        layers=layers_with_indexers(model.num_layers, every=every, after=offset),
        weights=tuple(_weights(model, mla, heads=sizes.heads, width=sizes.head_dim)),
        replaces=False,
        summed=True,
        counted_as="those of dense multi-latent attention",
        in_mtp=True,
        shares_keys=every > 1,
    )


def _offset(arguments: Arguments) -> int:
    """The last of the first layers that each have an indexer: the first layer always has one."""
    given = arguments.get(_OFFSET)
    return max(given, 1) if isinstance(given, int) else 1


def _weights(model: ModelSpec, mla: MlaSpec, *, heads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "indexer.linear_wq_b.weight", (heads * width, mla.q_lora_rank or model.hidden_size)
    yield "indexer.linear_wk.weight", (width, model.hidden_size)
    yield "indexer.k_norm.weight", (width,)
    yield "indexer.k_norm.bias", (width,)
    yield "indexer.linear_weights_proj.weight", (heads, model.hidden_size)


def _refuse(arguments: Arguments, job: TrainingJob) -> None:
    """Raises InputError for what `TransformerConfig.__post_init__` refuses."""
    named = option(arguments, _VARIANT)
    if job.model.bias_linear:
        raise InputError(named, "dsa has no biases in linear layers", "add --disable-bias-linear")
    if switched_on(arguments, "apply_rope_fusion") and job.model.rope_fusion:
        raise InputError(named, "RoPE fusion is not supported with dsa", "add --no-rope-fusion")
    if job.parallel.context > 1 and job.parallel.cp_comm_type != "all_gather":
        flag = option(arguments, "cp_comm_type")
        raise InputError(flag, "context parallelism of dsa gathers the keys", f"use {flag} all_gather")


def _check_stages(arguments: Arguments, plugin: PluginLayers, job: TrainingJob) -> None:
    """Raises InputError for a stage that begins with a layer which uses the keys that a layer of another stage chose."""
    model, parallel = job.model, job.parallel
    if not plugin.shares_keys or any(stage_violations(model.num_layers, parallel, mtp_layers=model.mtp_num_layers)):
        return
    first = next(_first_without(plugin, model.num_layers, parallel), None)
    if first is None:
        return
    before = max(layer for layer in range(1, first) if plugin.layers[layer - 1])
    raise InputError(
        option(arguments, "pipeline_model_parallel_size"),
        f"a stage begins with layer {first}, which uses the keys that layer {before} of another stage chose",
        "begin each stage with a layer that has an indexer",
    )


def _first_without(plugin: PluginLayers, layers: int, parallel: ParallelSpec) -> Iterator[int]:
    first = 1
    for count in layers_of_stages(layers, parallel):
        if count and not plugin.layers[first - 1]:
            yield first
        first += count
