"""Builds megatron-core's configuration objects from a `TrainingJob`, as `core_transformer_config_from_args` does."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from allocator_hook.step.hybrid import hybrid_options
from allocator_hook.step.versions import known_to
from analyzer.specs import AbsorbedSpec, Branch, TrainingJob

TORCH_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def transformer_config(job: TrainingJob) -> Any:
    """Build the TransformerConfig. The functions of the training loop (grad_scale_func, no_sync_func, …) are set later."""
    from megatron.core import transformer

    # core 0.8 has no multi-latent attention
    config_class = transformer.MLATransformerConfig if job.model.mla is not None else transformer.TransformerConfig
    if job.model.blocks and job.model.hybrid is None:
        from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

        config_class = HeterogeneousTransformerConfig
    options = {
        **_model(job),
        **_parallel(job),
        **_precision_and_flags(job),
        **_window(job),
        **_blocks(job),
        **_stages(job),
        **_recompute(job),
        **_activation_offload(job),
        **_mla(job),
        **_linear_attention(job),
        **_sparse_attention(job),
        **_compressed_attention(job),
        **_hyper_connections(job),
        **_fp8(job),
        **_moe(job),
        **_graphs(job),
        **hybrid_options(job),
    }
    config = config_class(**known_to(config_class, **options))
    for name, value in _yarn(job).items():  # the model reads these attributes, but releases up to 0.16 do not declare them
        setattr(config, name, value)
    return config


def _model(job: TrainingJob) -> dict[str, Any]:
    """Return the options for sizes, fusions and kernels of the model."""
    model = job.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "fp32_residual_connection": model.fp32_residual_connection,
        "apply_residual_connection_post_layernorm": model.apply_residual_connection_post_layernorm,
        "normalization": model.normalization,
        "qk_layernorm": model.qk_layernorm,
        "add_bias_linear": model.bias_linear,
        "add_qkv_bias": model.bias_qkv,
        "gated_linear_unit": model.gated,
        "activation_func": activation_function(job),
        "bias_activation_fusion": model.bias_activation_fusion,
        "use_fused_weighted_squared_relu": model.fused_squared_relu,
        "bias_dropout_fusion": model.bias_dropout_fusion,
        "masked_softmax_fusion": model.masked_softmax_fusion,
        "attention_softmax_in_fp32": model.attention_softmax_in_fp32,
        "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
        "apply_rope_fusion": model.rope_fusion,
        "persist_layer_norm": not (model.implementation == "local" and model.normalization == "RMSNorm"),
        **({} if model.softmax_type == "vanilla" else {"softmax_type": model.softmax_type}),  # older releases lack the option
        "activation_func_clamp_value": 7.0 if model.activation_clamped else None,  # the value has no effect on memory
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": 0.1 if model.mtp_num_layers else None,  # the value has no effect on memory
        "attention_backend": attention_backend(job),
        "transformer_impl": model.implementation,
        "cross_entropy_loss_fusion": model.cross_entropy != "unfused",
        "cross_entropy_fusion_impl": "te" if model.cross_entropy == "te" else "native",
    }


def _parallel(job: TrainingJob) -> dict[str, Any]:
    """Return the parallel sizes and the options of pipeline communication."""
    parallel = job.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": None if parallel.expert_tensor == parallel.tensor else parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "cp_comm_type": parallel.cp_comm_type,
        "hierarchical_context_parallel_sizes": hierarchy(job),
        **_microbatch_group(job),
        "overlap_p2p_comm": parallel.overlap_p2p,
        "batch_p2p_comm": not parallel.overlap_p2p,
        "deallocate_pipeline_outputs": True,
    }


def _precision_and_flags(job: TrainingJob) -> dict[str, Any]:
    """Return the data types and the flags of the training step."""
    flags, dtype = job.flags, TORCH_DTYPES[job.precision.parameters]
    return {
        "fp16": dtype is torch.float16,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "use_cpu_initialization": False,
        "init_model_with_meta_device": starts_from_meta(job),
        "gradient_accumulation_fusion": flags.gradient_accumulation_fusion,
        "deterministic_mode": flags.deterministic,
        "calculate_per_token_loss": flags.calculate_per_token_loss,
        "tp_comm_overlap": flags.tp_comm_overlap,
        "defer_embedding_wgrad_compute": flags.defer_embedding_wgrad,
        "overlap_moe_expert_parallel_comm": flags.overlap_moe_expert_parallel_comm,
        "delay_wgrad_compute": flags.delay_wgrad_compute,
        "ep_overlap_early_attn_memory_release": flags.early_attention_backward,
        "wgrad_deferral_limit": flags.wgrad_deferral_limit,
        **({"overlap_dispatch_backward_with_experts_wgrad": True} if flags.overlap_expert_gradients else {}),
    }


def starts_from_meta(job: TrainingJob) -> bool:
    """Return whether the model is created on the meta device, and materialized while it is sharded."""
    return job.fsdp is not None and job.fsdp.starts_from_meta


def _yarn(job: TrainingJob) -> dict[str, Any]:
    """Return the YaRN options that the model reads.

    The scaling factors only change values, except that an mscale other than 1 disables the fused RoPE kernel.
    """
    if job.model.yarn_positions is None:
        return {}
    return {
        "yarn_rotary_scaling_factor": 1.0,
        "yarn_original_max_position_embeddings": job.model.yarn_positions,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 1.0,
        "yarn_correction_range_round_to_int": True,
    }


def _blocks(job: TrainingJob) -> dict[str, Any]:
    """Return the per-layer configuration of heterogeneous layers as the JSON of `HeterogeneousTransformerConfig`."""
    model = job.model
    if not model.blocks or model.hybrid is not None:
        return {}

    def branch(kind: Branch, **sizes: int | None) -> dict[str, Any]:
        full = kind == "full"
        return {
            "no_op": kind == "none",
            "replace_with_linear": kind == "linear",
            **{name: size if full else None for name, size in sizes.items()},
        }

    layers = [
        {
            "attention": branch(block.attention, num_query_groups=model.num_query_groups),
            "mlp": branch(block.feed_forward, ffn_hidden_size=block.ffn_hidden_size),
        }
        for block in model.blocks
    ]
    return {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": layers})}


def _window(job: TrainingJob) -> dict[str, Any]:
    """Return the sliding-window options. If only some layers have a window, they are listed (since core 0.15)."""
    windowed = job.model.windowed
    if not any(windowed):
        return {}
    return {
        "window_size": job.model.window,
        "window_attn_skip_freq": None if all(windowed) else [int(each) for each in windowed],
    }


def _microbatch_group(job: TrainingJob) -> dict[str, Any]:
    """Return the option for the microbatches of a group. Releases before 0.10 have none; their groups are of the pipeline size."""
    from megatron.core.transformer import TransformerConfig

    name, size = "microbatch_group_size_per_vp_stage", job.parallel.microbatch_group_size or job.parallel.pipeline
    return {} if size == job.parallel.pipeline and not hasattr(TransformerConfig, name) else {name: size}


def hierarchy(job: TrainingJob) -> list[int] | None:
    """Return `--hierarchical-context-parallel-sizes`: the size of the all-to-all groups and of the ring (P2P) groups."""
    parallel = job.parallel
    if parallel.cp_comm_type != "a2a+p2p":
        return None
    return [parallel.cp_inner_size, parallel.context // parallel.cp_inner_size]


def _mla(job: TrainingJob) -> dict[str, Any]:
    mla = job.model.mla
    if mla is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "yarn" if mla.yarn else "rope",
    }


def _linear_attention(job: TrainingJob) -> dict[str, Any]:
    """Return the options of linear attention and of output gates, which older releases do not have."""
    model, linear = job.model, job.model.linear_attention
    gate = {"attention_output_gate": True} if model.output_gate else {}
    if linear is None:
        return gate
    return {
        **gate,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(each) for each in linear.layers],
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_conv_kernel_dim": linear.conv_kernel_dim,
    }


def _sparse_attention(job: TrainingJob) -> dict[str, Any]:
    """Return the options of DeepSeek sparse attention. The coefficient of its loss changes values only, unless it is 0."""
    sparse = job.model.sparse_attention
    if sparse is None:
        return {}
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": sparse.heads,
        "dsa_indexer_head_dim": sparse.head_dim,
        "dsa_indexer_topk": sparse.topk,
        "dsa_indexer_loss_coeff": 0.01 if sparse.logged else 0.0,
        "dsa_indexer_use_sparse_loss": sparse.sparse_loss,
        **_absorbed(sparse.absorbed),
    }


def _compressed_attention(job: TrainingJob) -> dict[str, Any]:
    """Return the options of the attention of DeepSeek-V4."""
    spec = job.model.compressed_attention
    if spec is None:
        return {}
    return {
        "experimental_attention_variant": "dsv4_hybrid",
        "csa_compress_ratios": list(spec.ratios),
        "csa_window_size": spec.window,
        "o_groups": spec.output_groups,
        "o_lora_rank": spec.output_rank,
        "dsa_indexer_n_heads": spec.index_heads,
        "dsa_indexer_head_dim": spec.index_head_dim,
        "dsa_indexer_topk": spec.topk,
        "dsa_indexer_loss_coeff": 0.01 if spec.logged else 0.0,
        "dsa_indexer_use_sparse_loss": True,
        "dsa_kernel_backend": "cudnn" if spec.kernels else "none",
        "moe_n_hash_layers": 0 if job.model.moe is None else job.model.moe.hash_layers,
        "actual_vocab_size": job.model.padded_vocab_size,
    }


def _hyper_connections(job: TrainingJob) -> dict[str, Any]:
    """Return the options of hyper-connections."""
    spec = job.model.hyper_connections
    if spec is None:
        return {}
    return {
        "enable_hyper_connections": True,
        "num_residual_streams": spec.streams,
        "mhc_sinkhorn_iterations": spec.iterations,
        "use_fused_mhc": spec.fused,
    }


def _absorbed(absorbed: AbsorbedSpec | None) -> dict[str, Any]:
    """Return the options that core 0.19 adds."""
    if absorbed is None:
        return {}
    return {
        "dsa_kernel_backend": absorbed.backend,
        "dsa_indexer_topk_freq": absorbed.every,
        "dsa_indexer_skip_topk_offset": absorbed.after,
        "dsa_indexer_rotate_activation": absorbed.rotated,
        "dsa_indexer_k_norm_fp32": absorbed.norm_in_fp32,
    }


def _fp8(job: TrainingJob) -> dict[str, Any]:
    """Return the options of FP8 or FP4."""
    fp8 = job.precision.fp8
    if fp8 is None:
        return {}
    kind: dict[str, Any] = {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.stored_parameters,
        "fp8_amax_history_len": fp8.amax_history_len,
        **({"fp8_dot_product_attention": True} if fp8.attention else {}),
        **({"fp8_output_proj": True} if fp8.output_layer else {}),
    }
    if fp8.recipe == "nvfp4":
        kind = {"fp4": fp8.format, "fp4_recipe": fp8.recipe, **({"fp4_param": True} if fp8.stored_parameters else {})}
    return {
        **kind,
        "first_last_layers_bf16": bool(fp8.layers_at_start_in_16_bit or fp8.layers_at_end_in_16_bit),
        "num_layers_at_start_in_bf16": fp8.layers_at_start_in_16_bit,
        "num_layers_at_end_in_bf16": fp8.layers_at_end_in_16_bit,
    }


def stores_fp8(job: TrainingJob, *recipes: str) -> bool:
    """Return whether weights are stored in FP8. If `recipes` are given, the recipe must also be one of them."""
    fp8 = job.precision.fp8
    return fp8 is not None and fp8.stored_parameters and (not recipes or fp8.recipe in recipes)


def _moe(job: TrainingJob) -> dict[str, Any]:
    """Return the options of MoE layers."""
    moe = job.model.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.layers],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_shared_expert_overlap": moe.shared_overlap,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": moe.grouped_gemm,
        "moe_use_legacy_grouped_gemm": moe.legacy_grouped_gemm,
        "moe_token_dispatcher_type": moe.dispatcher,
        **({} if moe.flex is None else {"moe_flex_dispatcher_backend": moe.flex.backend}),
        **({"moe_hybridep_pad_uneven_dispatch_inputs": True} if moe.flex is not None and moe.flex.equalizes else {}),
        "moe_permute_fusion": moe.permute_fusion,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "moe_pad_expert_input_to_capacity": moe.pad_to_capacity,
        "moe_router_dtype": moe.router_dtype,
        "moe_router_load_balancing_type": moe.load_balancing[0] if len(moe.load_balancing) == 1 else list(moe.load_balancing),
        "moe_aux_loss_coeff": moe.aux_loss_coeff,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_latent_size": moe.latent_size,
        **_router_padding(moe.pad_for_quantization),
    }


def _router_padding(padded: bool) -> dict[str, Any]:
    """Return the option under the name that the installed release uses."""
    from megatron.core.transformer import TransformerConfig

    new, old = "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"
    return {new if hasattr(TransformerConfig, new) else old: True} if padded else {}


def _graphs(job: TrainingJob) -> dict[str, Any]:
    """Return the options of CUDA graphs."""
    if job.graphs is None:
        return {}
    return {
        "cuda_graph_impl": job.graphs.implementation,
        "cuda_graph_scope": list(job.graphs.scope),
        "cuda_graph_warmup_steps": job.graphs.warmup_steps,
    }


def _stages(job: TrainingJob) -> dict[str, Any]:
    layout = job.parallel.pipeline_layout
    return {
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "pipeline_model_parallel_layout": "|".join(layout.layout) if layout.layout else None,
    }


def _recompute(job: TrainingJob) -> dict[str, Any]:
    recompute = job.recompute
    return {
        "recompute_granularity": recompute.granularity,
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
        "recompute_modules": list(recompute.modules) if recompute.granularity == "selective" else None,
        **_recomputed_stream(job),
        "distribute_saved_activations": recompute.distribute_saved_activations,
    }


def _recomputed_stream(job: TrainingJob) -> dict[str, Any]:
    """Return the module that the catalogue of released options does not have: `mhc`."""
    if job.model.hyper_connections is None or not job.model.hyper_connections.recomputed:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": [*job.recompute.modules, "mhc"]}


def _activation_offload(job: TrainingJob) -> dict[str, Any]:
    """Return the options for activations on the host: of some modules, or of the first layers."""
    offload = job.activation_offload
    if offload is None:
        return {}
    if offload.layers:
        return {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": offload.layers,
            "cpu_offloading_activations": True,
            "cpu_offloading_weights": False,
        }
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(offload.modules),
        "min_offloaded_tensor_size": offload.min_elements,
    }


def activation_function(job: TrainingJob) -> Any:
    """Return the activation function that `--swiglu` and similar options select."""
    from torch.nn import functional

    activation = job.model.activation
    if activation == "squared_relu":
        from megatron.core.activations import squared_relu

        return squared_relu
    if activation == "quick_geglu":
        from megatron.core import activations
        from megatron.core.fusions import fused_bias_geglu

        if job.model.scaled_embedding:  # that of Gemma
            return activations.fast_gelu
        # exists since core 0.15, where the MLP compares its activation function with it
        return getattr(fused_bias_geglu, "quick_gelu", activations.quick_gelu)
    return functional.silu if activation in ("swiglu", "silu") else functional.gelu


def attention_backend(job: TrainingJob) -> Any:
    """Return the attention backend of the job; None before core 0.11, which has no such option.

    If layers with a sliding window have another backend, Transformer Engine chooses it for each layer. The local layers of BERT
    have one kernel, which must not be named (`BertModel._sanity_check_attention_and_get_attn_mask_dimension`).
    """
    from megatron.core.transformer import enums

    chosen = job.model.window_backend is not None or (job.model.family == "bert" and job.model.implementation == "local")
    name = "auto" if chosen else job.model.attention_backend
    return enums.AttnBackend[name] if hasattr(enums, "AttnBackend") else None
