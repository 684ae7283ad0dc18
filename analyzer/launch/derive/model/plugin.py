"""Attention with weights whose activations are not modelled: that of plugins, and sparse attention with kernels of TileLang.

Megatron: `get_dsa_module_spec_for_backend` (core/models/gpt/experimental_attention_variant_module_specs.py),
`TransformerConfig.__post_init__`, `DSAttention` and `DSAIndexer` (core/transformer/experimental_attention_variant/dsa.py), 0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.model.sparse_attention import assume_speed, index_sizes, last_of_first_indexers
from analyzer.launch.derive.reading import positive
from analyzer.specs.attention import PluginLayers, layers_with_indexers

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import MlaSpec, ModelSpec, TrainingJob

_VARIANT: Final = "experimental_attention_variant"
_FREQUENCY: Final = "dsa_indexer_topk_freq"


def with_plugin(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the weights of a plugin, or of the indexers of core 0.19, in its attention, and what is not counted of it."""
    if job.model.sparse_attention is not None:
        assume_speed(launch, job.model.sparse_attention)
    plugin = launch.arguments.parts.plugin or _of_core(launch.arguments, job)
    if plugin is None:
        return job
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
    """The indexers of core 0.19 and later with kernels of TileLang; None without them."""
    model, mla = job.model, job.model.mla
    if arguments.get(_VARIANT) != "dsa" or mla is None or model.sparse_attention is not None:
        return None
    sizes = index_sizes(arguments)
    every, offset = positive(arguments, _FREQUENCY) or 1, last_of_first_indexers(arguments)
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


def _weights(model: ModelSpec, mla: MlaSpec, *, heads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "indexer.linear_wq_b.weight", (heads * width, mla.q_lora_rank or model.hidden_size)
    yield "indexer.linear_wk.weight", (width, model.hidden_size)
    yield "indexer.k_norm.weight", (width,)
    yield "indexer.k_norm.bias", (width,)
    yield "indexer.linear_weights_proj.weight", (heads, model.hidden_size)
