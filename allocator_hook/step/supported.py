"""The fields of a job that the recorded step supports. A field that is set but not supported is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final

from analyzer.errors import UnsupportedError
from analyzer.specs import TrainingJob

READ: Final[dict[str, frozenset[str]]] = {
    "ModelSpec": frozenset(
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size padded_vocab_size "
        "max_position_embeddings position_embedding rotary_percent rope_fusion normalization activation bias_linear bias_qkv "
        "qk_layernorm norm_modules layer_scaling branch_norms norms_in_projections local_rope scaled_embedding "
        "tied_embeddings hidden_dropout attention_dropout bias_activation_fusion bias_dropout_fusion "
        "masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling apply_residual_connection_post_layernorm "
        "fp32_residual_connection implementation attention_backend cross_entropy fp16_lm_cross_entropy moe mla "
        "linear_attention sparse_attention compressed_attention hyper_connections output_gate "
        "softmax_type glu_offset window windowed window_backend activation_clamped blocks mtp_num_layers yarn_positions hybrid "
        "fused_squared_relu family binary_head decoder_seq_length vision frozen adapters frozen_parameters "
        "head_outputs value_head token_score distillation log_probability_loss loss_sequences sample_length".split()
    ),
    "VisionSpec": frozenset(
        "kind encoder projector projector_input normed_projector image_height image_width patch class_tokens drops_class_tokens "
        "tiles text_length causal_encoder recompute separate_fields pixel_shuffle tag_tokens".split()
    ),
    "AdapterSpec": frozenset("rank expert_rank targets per_expert layers method dropout regathers trained_copies".split()),
    "FreezeSpec": frozenset("prefixes pattern ratio trained_prefixes trained_pattern".split()),
    "DistillationSpec": frozenset("framework divergence topk sequences whole_vocabulary".split()),
    "SparseAttentionSpec": frozenset("heads head_dim topk logged sparse_loss absorbed".split()),
    "CompressedAttentionSpec": frozenset(
        "ratios head_dim q_lora_rank output_groups output_rank window index_heads index_head_dim topk kernels logged".split()
    ),
    "HyperConnectionSpec": frozenset("streams iterations fused recomputed".split()),
    "AbsorbedSpec": frozenset("backend every after rotated norm_in_fp32".split()),
    "HybridSpec": frozenset("pattern state_dim head_dim groups heads memory_efficient mtp_pattern mtp_repeated".split()),
    "MoeSpec": frozenset(
        "num_experts topk ffn_hidden_size layers shared_ffn_hidden_size shared_overlap shared_gate grouped_gemm "
        "legacy_grouped_gemm dispatcher permute_fusion capacity_factor pad_to_capacity router_dtype load_balancing "
        "aux_loss_coeff z_loss_coeff score_function pre_softmax expert_bias latent_size "
        "pad_for_quantization hash_layers adds_by_index sorts_positions flex imbalance".split()
    ),
    "FlexSpec": frozenset("backend sms nvlink_ranks equalizes".split()),
    "MlaSpec": frozenset("q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim yarn first_angles_stay".split()),
    "LinearAttentionSpec": frozenset(
        "layers num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim frequency".split()
    ),
    "ParallelSpec": frozenset(
        "world_size nodes gpus_per_node tensor pipeline virtual_pipeline context expert expert_tensor order sequence_parallel "
        "microbatch_group_size distributed_optimizer_instances overlap_p2p pipeline_layout cp_comm_type cp_inner_size".split()
    ),
    "PipelineSpec": frozenset("num_layers_in_first num_layers_in_last account_for_embedding account_for_loss layout".split()),
    "BatchSpec": frozenset("micro_batch_size global_batch_size seq_length microbatches first_microbatches".split()),
    "PrecisionSpec": frozenset("parameters gradients fp8".split()),
    "Fp8Spec": frozenset(
        "format recipe stored_parameters layers_at_start_in_16_bit layers_at_end_in_16_bit amax_history_len attention "
        "output_layer".split()
    ),
    "OptimizerSpec": frozenset(
        "name sgd_momentum distributed precision_aware main_params_dtype exp_avg_dtype exp_avg_sq_dtype fp8_recipe "
        "overlap_grad_reduce aligned_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step ddp_bucket_size "
        "ddp_num_buckets pad_buckets_for_high_nccl_busbw average_in_collective reduce_scatter_with_fp32_accumulation clip_grad "
        "weight_decay log_num_zeros_in_grad log_params_norm offload muon".split()
    ),
    "FsdpSpec": frozenset(
        "implementation strategy outer_sharding expert_instances main_gradients reduced_gradients communication_unit_size "
        "double_buffer reshard_after_forward starts_from_meta moments_from_start outside_layers_prefetches "
        "outside_layers_stay".split()
    ),
    "MuonSpec": frozenset("layer_wise aligned tensor_parallel split_qkv nesterov steps iterates_dtype scalar_optimizer".split()),
    "OffloadSpec": frozenset("fraction pinned_gradients collected".split()),
    "ActivationOffloadSpec": frozenset("layers modules min_elements cached_weights".split()),
    "RecomputeSpec": frozenset("granularity method num_layers modules distribute_saved_activations".split()),
    "GraphSpec": frozenset("implementation scope warmup_steps".split()),
    "TrainingFlags": frozenset(
        "gradient_accumulation_fusion attention_mask_in_dataloader deterministic calculate_per_token_loss "
        "check_for_nan_in_loss_and_grad tp_comm_overlap defer_embedding_wgrad wgrad_deferral_limit cublas_workspace_config "
        "cuda_device_max_connections use_cpu_initialization empty_unused_memory_level data_parallel_random_init "
        "allocator_config overlap_moe_expert_parallel_comm early_attention_backward delay_wgrad_compute "
        "overlap_expert_gradients".split()
    ),
    "FineTuning": frozenset(
        {
            "objective",
            "method",
            "adapter",
            "freezing",
            "vision",
            "packed",
            "longest_sample",
            "filled",
            "head_outputs",
            "value_head",
            "token_score",
            "sequences_per_sample",
            "longest_counted",
        }
    ),
    "VisionTraining": frozenset("holder frozen uncounted".split()),
    "Adapter": frozenset(
        "kind rank alpha targets dropout adapter_dtype base_dtype share_expert_adapters layers regathers options also_trained "
        "source".split()
    ),
    "AssumedVocabulary": frozenset("reason others".split()),
    "SoftwareSpec": frozenset("te torch".split()),
    "NcclSpec": frozenset("buffer_bytes nvlink_chunk network_chunk fewest_channels most_channels trees sharp forwards".split()),
    "HardwareSpec": frozenset("name capacity_bytes compute_capability multiprocessors margin_bytes nvlink_domain nvlinks".split()),
    "TrainingJob": frozenset(
        "model parallel batch precision optimizer recompute flags hardware megatron software assumptions warnings unknown "
        "activation_offload fsdp graphs assumed_vocabulary tuning nccl".split()
    ),
}
"""Supported fields by spec. They include fields that only change values or start-up, or that megatron-core decides itself."""


def check_supported(job: TrainingJob) -> None:
    """Raise UnsupportedError for the first field that is set but not supported."""
    if job.model.implementation == "legacy":
        raise UnsupportedError(
            "--info-engine shadow", "the legacy model code of 2023 is not part of megatron-core", "use --info-engine formula"
        )
    if job.model.vision is not None and (job.parallel.context > 1 or job.model.family == "mimo"):
        what = "MIMO models" if job.model.family == "mimo" else "images with context parallelism"
        raise UnsupportedError("--info-engine shadow", f"the recorded step does not support {what}", "use --info-engine formula")
    if job.model.moe is not None and job.model.moe.flex is not None and job.model.moe.imbalance != 1:
        raise UnsupportedError(
            "--info-moe-imbalance", "the shadow engine does not support it with the flex dispatcher", "use --info-engine formula"
        )
    layout = job.parallel.pipeline_layout.layout or ()
    if job.parallel.virtual_pipeline is not None and any("m" in stage for stage in layout[:-1]):
        raise UnsupportedError(
            "--pipeline-model-parallel-layout",
            "the shadow engine does not support interleaved stages with MTP layers (m) before the last stage",
            "move m to the last stage, or use --info-engine formula",
        )
    for name in _ignored(job):
        raise UnsupportedError("--info-engine shadow", f"the recorded step does not support {name}", "use --info-engine formula")


def _ignored(spec: Any) -> Iterator[str]:
    """Yield "Spec.field" for each field that is set but not in `READ`."""
    read = READ.get(type(spec).__name__, frozenset())
    for field in fields(spec):
        value = getattr(spec, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name not in read and value != default:
            yield f"{type(spec).__name__}.{field.name}"
        elif field.name in read and is_dataclass(value):
            yield from _ignored(value)
