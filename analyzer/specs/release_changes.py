"""What releases of megatron-core, Transformer Engine and PyTorch change in memory, communication, time and names, as tables.

Each field of a table names the releases in which it has a value. Formulas read the fields and compare no releases.
Fields from 0.17 on were found by running each release in the shadow engine (`make shadow CHECKOUT=FOLDER`) and reading the
difference of its sources. `tools/release_truth.py` reads the lines of the sources that prove a field, of every release.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from analyzer.specs.release import release_number
from analyzer.specs.software import version_number


class _Changes(tuple[tuple[tuple[int, ...], Any], ...]):
    """The values of a field, each with the first release that has it, oldest first."""


class Behavior:
    """The values that the fields of a table have in a release. It is equal to that of another release with equal values."""

    def __init__(self, release: tuple[int, ...]) -> None:
        for name, values in changes_of(type(self)).items():
            setattr(self, name, [value for first, value in values if first <= release][-1])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


def _by_release(first: Any, later: Mapping[str, Any]) -> Any:
    """A field with the value `first`, and another one from each release in `later` on, oldest first."""
    return _Changes((((), first), *((version_number(release), value) for release, value in later.items())))


def _during(*, since: str = "", until: str = "") -> Any:
    """A field that is True from the release `since` on and before `until`; without them, from the first or until the newest one."""
    return _by_release(not since, {release: value for release, value in ((since, True), (until, False)) if release})


class CoreBehavior(Behavior):
    """What a release of megatron-core does. Files are those of `megatron/core` unless they are named in full."""

    # attention and layers
    attention_in_batches: bool = _during(until="0.14")
    """After the fused rotation, attention is computed in [b, s, a, d] (`TEDotProductAttention.forward`)."""
    concatenates_rotated_samples: bool = _during(until="0.15")
    """Unfused RoPE rotates each sample of a packed sequence, and concatenates them (`_apply_rotary_pos_emb_thd`, models/common/
    embeddings/rope_utils.py)."""
    writes_rotated_samples: bool = _during(since="0.19", until="0.20")
    """It does so again, and copies each to its place in the output. In between and later it rotates all samples at once."""
    first_angles_stay: bool = _during(until="0.16")
    """With YaRN, the cached frequencies of RoPE stay allocated after its tables were computed (`MultiLatentAttention`)."""
    saves_original_input: bool = _during(since="0.14")
    """Some layers in FP8 save their 16-bit input (`set_save_original_input`)."""
    caches_dummies: bool = _during(since="0.14")
    """Megatron's own linear layers return dummies of Transformer Engine as fused weight gradients
    (`get_dummy_wgrad`, tensor_parallel/layers.py)."""
    copies_recomputed: bool = _during(until="0.17")
    """A checkpoint without output copies the recomputed output to the storage that it freed in the forward. Later it makes that
    storage refer to the recomputed memory (`CheckpointWithoutOutput._recompute`, tensor_parallel/random.py)."""
    copies_logits: bool = _during(until="0.8")
    """The cross entropy subtracts the maximum into a new tensor (tensor_parallel/cross_entropy.py)."""
    few_query_groups: bool = _during(since="0.16")
    """There may be fewer query groups than tensor-parallel ranks (transformer/attention.py)."""
    norms_input_of_queries: bool = _during(since="0.19")
    """With --qk-layernorm and queries that are not compressed, the projection of the queries of latent attention has a norm of its
    input (`QKNormConfigResolver`, transformer/mla_qk_norm_config.py)."""
    convolves_rows: bool = _during(since="0.18")
    """A gated delta net convolves [b, s, channels] without a copy, normalizes queries and keys together, and compiles what prepares
    the delta rule (ssm/gated_delta_net.py, later ssm/gated_delta_net)."""
    prepares_gates: bool = _during(since="0.20")
    """The compiled function that prepares the delta rule computes its gates too, from slices of the input projection
    (`_prepare_input_for_gated_delta_rule`, ssm/gated_delta_net/common.py)."""
    glu_offset: bool = _during(since="0.15")
    """An offset is added to the linear half of an unfused gated activation, even if it is 0 (transformer/mlp.py)."""

    keeps_previous_output: bool = _during(until="0.18")
    """Without a pipeline, the schedule references the output of a microbatch until that of the next one replaces it
    (`forward_backward_no_pipelining`, pipeline_parallel/schedules.py)."""

    # experts
    router_in_te: bool = _during(since="0.13")
    """Routers multiply with `te_general_gemm` (extensions/transformer_engine.py)."""
    router_needs_workspace: bool = _during(until="0.17")
    """That function needs `get_workspace` of Transformer Engine."""
    adds_by_index: bool = _during(since="0.15")
    """With `--deterministic-mode`, outputs of experts are summed by `index_add_` (`unpermute`, transformer/moe/moe_utils.py)."""
    sorts_positions: bool = _during(since="0.17")
    """An unfused permutation sorts all pairs of expert and token, and saves their positions (`permute`, the same file)."""
    pads_in_permutation: bool = _during(since="0.17")
    """DeepEP's dispatcher gives the fused permutation the multiple of rows that FP8 needs (`_DeepepManager`,
    transformer/moe/token_dispatcher.py)."""
    pads_16_bit_rows: bool = _during(since="0.16", until="0.18")
    """It gives one without FP8 too (`get_align_size_for_quantization`, transformer/moe/moe_utils.py)."""
    frees_arrivals: bool = _during(since="0.18")
    """DeepEP's dispatcher drops the choices of arrived tokens after it has combined the rows (`_DeepepManager.combine`)."""
    frees_unsaved_rows: bool = _during(since="0.17")
    """The expert node of overlapped microbatches frees the rows that it has read unless the first linear layer saves them.
    Before, it frees them with all dispatchers but HybridEP (`should_free_input`)."""
    keeps_dispatched_gradients: bool = _during(until="0.18")
    """With delayed weight gradients the dispatch node of overlapped microbatches keeps the gradients that it has read until the
    backward of the layer ends (`ScheduleNode.delay_grads_release`, pipeline_parallel/utils.py)."""
    holds_returning_rows: bool = _during(since="0.18")
    """With `--moe-shared-expert-overlap` the all-to-all dispatcher computes the second layer of the shared experts while an
    argument still references the rows that it has sent back (`MoEAlltoAllTokenDispatcher.token_combine`)."""
    stream_of_each_layer: bool = _during(until="0.18")
    """With `--moe-shared-expert-overlap` each layer creates a stream for its shared experts; later all layers have one
    (`SharedExpertMLP`)."""
    marks_split_experts: bool = _during(since="0.17")
    """Weights of experts know the dimension in which tensor-parallel ranks split them (`TEGroupedLinear`)."""

    skips_final_norm: bool = _during(since="0.16")
    """Of overlapped microbatches only the combine node of experts calls the final norm, if the chunk has layers
    (`PostProcessNode`)."""

    # multi-token prediction
    mtp_layer: str = _by_release("transformer_layer", {"0.17": "mtp_model_layer"})
    """Name of the transformer layer in an MTP layer (transformer/multi_token_prediction.py)."""
    recomputes_hybrid_stacks: bool = _during(since="0.18")
    """The stacks of hybrid models, also those of MTP layers, have checkpoints with full recomputation (`HybridStack.forward`,
    models/hybrid/hybrid_block.py). Before, only the checkpoint around an MTP layer has an effect."""
    holds_mtp_logits: bool = _during(until="0.17")
    """The logits of the last MTP layer are referenced until the loss of the model is computed: they are a local variable of
    `GPTModel._postprocess`. Later they belong to the function `process_mtp_loss`, which returns before that."""
    mtp_attention_of_last_layer: bool = _during(since="0.19")
    """The attention of MTP layers is that of the last decoder layer (`gpt_builder`), which must not be linear then."""
    counts_mtp_predictions: bool = _during(since="0.19")
    """Each MTP layer counts its right predictions: tensor-parallel ranks gather the largest logits and their indices, and
    data-parallel ranks sum two counters (`_compute_mtp_acceptance_counts`, `reduce_metrics_in_tracker`)."""

    # buffers of parameters and gradients
    parameters_in_buffers: bool = _during(since="0.6")
    """The distributed optimizer has buffers for parameters. Before, they were gathered through the gradient buffer
    (distributed/param_and_grad_buffer.py, megatron/optimizer/distrib_optimizer.py)."""
    buckets_by_ranks: bool = _during(since="0.7")
    """The default size of a bucket grows with the data-parallel size (distributed/distributed_data_parallel.py)."""
    aligns_buckets: bool = _during(since="0.7")
    """Buckets are padded to a multiple of 128 elements (distributed/param_and_grad_buffer.py)."""
    aligns_parameters: bool = _during(since="0.8")
    """Parameters start at multiples of 64 elements in the buffers of the distributed optimizer (the same file)."""
    keeps_16_bit_parameters: bool = _during(until="0.17")
    """With `--reuse-grad-buf-for-mxfp8-param-ag`, parameters in 16 bit keep their allocations in addition to their buffer
    (`_ParamAndGradBuffer`)."""
    has_first_batch: bool = _during(since="0.16")
    """A group of buckets starts the reductions of its first batch when all gradients of that batch are registered
    (`_ParamAndGradBucketGroup.is_first_batch`)."""
    has_number_of_buckets: bool = _during(since="0.12")
    """The option `--ddp-num-buckets` exists."""

    # optimizer
    adam_keeps_masters: bool = _during(until="0.13")
    """The precision-aware Adam stores the master weights with every FP8 recipe. Later Megatron does unless it is delayed
    (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, optimizer/optimizer_config.py)."""
    statistics_of_all_ranks: bool = _during(until="0.13")
    """The distributed optimizer reduces gradient statistics over all ranks, not those of one of its instances
    (`DistributedOptimizer.get_grad_stats_parallel_group`)."""
    chained_optimizers_count_zeros: bool = _during(since="0.12", until="0.13")
    """Zeros are counted if all optimizers reduce over one group (`ChainedOptimizer.count_zeros`)."""
    muon_compares_groups: bool = _during(since="0.16", until="0.18")
    """`get_megatron_muon_optimizer` removes parameter groups by comparing them (`list.remove`)."""
    layer_wise_receives_own: bool = _during(until="0.17")
    """A rank of the layer-wise optimizer also receives its own parameters (`LayerWiseDistributedOptimizer.allgather_params`)."""

    has_layer_wise_layout: bool = _during(since="0.18")
    """The option `--use-layer-wise-param-layout` exists."""

    # FSDP
    fsdp_gradients_in_fp32: bool = _during(until="0.19")
    """`--accumulate-allreduce-grads-in-fp32`, on by default with bf16, overrides the gradient types of Megatron-FSDP. Later only
    `--megatron-fsdp-main-grads-dtype` counts, whose default is the type of the parameters
    (distributed/fsdp/mcore_fsdp_adapter.py)."""
    fsdp_units_without_sharding: bool = _during(since="0.20")
    """Layers are units of Megatron-FSDP, each with a bucket, also with strategies that do not shard parameters (the same file)."""
    fsdp_units_of_mamba: bool = _during(since="0.19")
    """Mamba layers are units of Megatron-FSDP (the same file)."""

    fsdp_meshes_of_instances: bool = _during(since="0.14")
    """Megatron-FSDP has a mesh over optimizer instances (the same file)."""
    fsdp_expert_instances: bool = _during(since="0.17")
    """It has such a mesh for experts too (the same file)."""

    fsdp_marks_all_modules: bool = _during(since="0.18")
    """In the backward Megatron-FSDP marks all modules, not only its units: those outside layers do not prefetch layers in every
    forward, and stay unsharded (`_root_pre_backward`, distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py)."""

    # time
    legacy_interleaving: bool = _during(until="0.10")
    """The interleaved schedule has groups of as many microbatches as stages (pipeline_parallel/schedules.py)."""
    flops_of_experts: bool = _during(since="0.16")
    """Megatron's own FLOPs of hybrid models count layers of experts (`num_floating_point_operations`, megatron/training)."""
    flops_of_depths: bool = _during(since="0.17")
    """They count the depths of multi-token prediction (the same function)."""


class CoreFailures(Behavior):
    """What a release of megatron-core accepts and then fails with. `specs.rules.failures` has the launches that are concerned.

    A failure that the newest release has too ends with it, because nothing is known of later ones.
    """

    fsdp_of_stages: bool = _during(since="0.14", until="0.20")
    """Megatron-FSDP has no mesh with pipeline ranks (`_get_dp_tp_mesh`, distributed/fsdp/mcore_fsdp_adapter.py)."""
    fsdp_in_fp16: bool = _during(since="0.14", until="0.20")
    """It scales gradients of parameters of other shards, which are None (`_collect_main_grad_data_for_unscaling`)."""
    fsdp_blockwise_weights: bool = _during(since="0.16", until="0.17")
    """It compares shards with whole blockwise FP8 weights (`ParamAndGradBuffer.copy_main_weights_to_model_weights`)."""
    fsdp_outer_shards: bool = _during(until="0.20")
    """Optimizer instances need sharded parameters (`ParamAndGradBuffer._init_each_parameter_group_buffers`)."""
    graphs_of_stages: bool = _during(since="0.16", until="0.20")
    """The schedule frees the output of a recorded stage (`deallocate_output_tensor`, pipeline_parallel/schedules.py)."""
    dense_mtp_overlapped: bool = _during(since="0.14", until="0.19")
    """MTP layers of overlapped microbatches need experts (`build_mtp_layer_callables`)."""
    final_norm_unreduced: bool = _during(since="0.16", until="0.20")
    """A final norm that overlapped microbatches skip has no gradient to reduce (`submodule_combine_forward`)."""
    gates_of_few_groups: bool = _during(until="0.17")
    """With fewer query groups than tensor-parallel ranks, output gates are not sliced like queries (transformer/attention.py)."""
    mtp_without_userbuffers: bool = _during(until="0.17")
    """The projection of MTP layers has no name of a buffer for overlapped tensor parallelism (`TEColumnParallelLinear`)."""
    mtp_recompute: bool = _during(since="0.18", until="0.19")
    """The checkpoint around an MTP layer gets an argument that it has not (`MultiTokenPredictionLayer.forward`)."""
    latent_gradients_never: bool = _during(until="0.17")
    """Delayed weight gradients of latent projections are never computed (`MoELayer.backward_dw`)."""
    uniform_groups_complete: bool = _during(since="0.10", until="0.17")
    """Uniform recomputation needs complete groups of layers (`TransformerBlock._checkpointed_forward`)."""


class EngineBehavior(Behavior):
    """What a release of Transformer Engine does. Files are those of `transformer_engine/pytorch`."""

    attention_in_batches: bool = _during(since="0.14")
    """Its attention reads tensors in [b, s, a, d], so that Megatron passes them after a fused rotation."""
    reorders_each_sample: bool = _during(since="2.10", until="2.18")
    """Context parallelism with `--cp-comm-type a2a` computes the positions of each packed sample with operations of its own, whose
    ends the host reads from the GPU (`reorder_seq_chunks_after_a2a_before_attn_thd`,
    attention/dot_product_attention/context_parallel.py). Later and earlier releases do not."""
    norms_save_views: bool = _during(until="1.13")
    """Norms save a view of their input where later ones save a contiguous copy."""
    general_gemm: bool = _during(since="2.0")
    """The function `general_gemm` exists (cpp_extensions/gemm.py)."""
    has_get_workspace: bool = _during(until="2.10")
    """The function `get_workspace` exists (module/base.py)."""
    caches_dummies: bool = _during(since="2.3")
    """Linear layers cache the dummies that they return as fused weight gradients (module/base.py `get_dummy_wgrad`)."""
    caches_grouped_dummies: bool = _during(since="2.10")
    """Grouped linear layers do so too (module/grouped_linear.py)."""
    stores_remainders: bool = _during(since="2.1")
    """Adam can store of a master weight only what its bf16 parameter lacks (optimizers/fused_adam.py `store_param_remainders`)."""
    updates_bf16_moments: bool = _during(since="2.13")
    """The kernels of Adam update moments in place if both are bf16 (`fuse_unscale`, the same file)."""
    fp4_padding: int = _by_release(64, {"2.12": 128})
    """The rows of each expert in FP4 are padded to a multiple of this (`get_align_size_for_quantization`)."""
    pads_in_permutation: bool = _during(since="2.12")
    """A fused permutation can pad the rows of each expert (`moe_permute_and_pad_with_probs`, permutation.py)."""
    tensorwise_scales: bool = _during(until="2.16")
    """Quantizers with current scaling (tensorwise) have a scaling factor and an amax of their own."""


class TorchBehavior(Behavior):
    """What a release of PyTorch does."""

    large_workspace_on_blackwell: bool = _during(since="2.12")
    """The default workspace of cuBLAS on Blackwell is that on Hopper (pull request 175344)."""


def changes_of(table: type[Behavior]) -> dict[str, tuple[tuple[tuple[int, ...], Any], ...]]:
    """The values of each field of a table, each with the first release that has it, oldest first."""
    return {name: values for name, values in vars(table).items() if isinstance(values, _Changes)}


@cache
def core_behavior(release: str) -> CoreBehavior:
    """The behavior of a release of megatron-core, such as '0.18.2' or '2023'."""
    return CoreBehavior(release_number(release))


@cache
def core_failures(release: str) -> CoreFailures:
    """What a release of megatron-core fails with."""
    return CoreFailures(release_number(release))


@cache
def engine_behavior(version: str | None) -> EngineBehavior:
    """The behavior of a version of Transformer Engine, such as '2.11'. None, for no Transformer Engine, has that of the oldest."""
    return EngineBehavior(() if version is None else version_number(version))


@cache
def torch_behavior(version: str) -> TorchBehavior:
    """The behavior of a version of PyTorch. A development version such as '2.12.0a0' counts as that release."""
    return TorchBehavior(version_number(version))


MTP_LAYERS: Final = tuple(value for _, value in changes_of(CoreBehavior)["mtp_layer"])
"""All names of the transformer layer in an MTP layer."""
