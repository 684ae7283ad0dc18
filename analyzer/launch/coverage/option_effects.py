"""Options of Megatron-LM that are modelled, and options without effect on memory and communication.

Releases 0.3 to 0.19 and the code of August 2023. Options that are refused, or for which an assumption is made, are in `supported`.
"""

from __future__ import annotations

from typing import Final

_MODELLED: Final = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split accumulate_allreduce_grads_in_fp32
    activation_func_clamp_value add_bias_linear add_position_embedding add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_rope_fusion attention_backend attention_dropout
    attention_output_gate attention_softmax_in_fp32 bert_binary_head bf16 bias_dropout_fusion bias_gelu_fusion
    bias_swiglu_fusion calculate_per_token_loss
    check_for_nan_in_loss_and_grad ckpt_format clip_grad context_parallel_size cp_comm_type cpu_offloading_num_layers
    create_attention_mask_in_dataloader cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_impl cuda_graph_modules cuda_graph_scope cuda_graph_scope_deprecated cuda_graph_warmup_steps enable_cuda_graph
    external_cuda_graph
    data_parallel_random_init data_parallel_sharding_strategy ddp_average_in_collective ddp_bucket_size
    ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers decoder_num_layers decoder_seq_length
    decrease_batch_size_if_needed defer_embedding_wgrad_compute deterministic_mode distribute_saved_activations
    dsa_indexer_head_dim dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss
    dsa_kernel_backend
    empty_unused_memory_level encoder_num_layers encoder_seq_length eval_global_batch_size exp_avg_dtype
    exp_avg_sq_dtype expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size finetune fp4 fp4_param_gather fp4_recipe
    fine_grained_activation_offloading
    first_last_layers_bf16 fp16 fp16_lm_cross_entropy fp32_residual_connection fp8 fp8_amax_history_len
    fp8_output_proj fp8_param_gather fp8_recipe fsdp_double_buffer global_batch_size grad_reduce_in_bf16
    gradient_accumulation_fusion group_query_attention hidden_dropout hidden_size
    heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    hybrid_attention_ratio hybrid_layer_pattern hybrid_mlp_ratio hybrid_override_pattern img_h img_w is_hybrid_model
    disable_mamba_mem_eff_path mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim use_mamba_mem_eff_path
    hierarchical_context_parallel_sizes init_model_with_meta_device kv_channels kv_lora_rank
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim log_num_zeros_in_grad log_params_norm loss_scale lr_decay_samples lr_warmup_samples
    main_grads_dtype main_params_dtype
    make_vocab_size_divisible_by manual_gc masked_softmax_fusion max_position_embeddings megatron_fsdp_grad_comm_dtype
    megatron_fsdp_main_grads_dtype micro_batch_size microbatch_group_size_per_vp_stage min_offloaded_tensor_size
    moe_aux_loss_coeff
    moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_expert_capacity_factor moe_ffn_hidden_size moe_grouped_gemm moe_latent_size moe_layer_freq
    moe_expert_rank_capacity_factor moe_hybridep_pad_uneven_dispatch_inputs moe_mlp_glu_interleave_size
    moe_paged_stash moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype
    moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax moe_router_score_function
    moe_router_topk moe_shared_expert_gate moe_shared_expert_intermediate_size moe_shared_expert_overlap wgrad_deferral_limit
    moe_token_dispatcher_type moe_use_legacy_grouped_gemm moe_z_loss_coeff mtp_num_layers multi_latent_attention
    muon_coefficient_type muon_fp32_matmul_prec muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_split_qkv
    muon_tp_mode muon_use_nesterov optimizer_cpu_offload optimizer_offload_fraction pin_cpu_grads use_layer_wise_param_layout
    no_load_optim normalization num_attention_heads num_distributed_optimizer_instances num_experts num_layers
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_per_virtual_pipeline_stage num_query_groups
    num_virtual_stages_per_pipeline_rank offload_modules outer_dp_sharding_strategy overlap_grad_reduce overlap_p2p_comm
    align_grad_reduce overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
    overlap_dispatch_backward_with_experts_wgrad
    overlap_p2p_comm_warmup_flush overlap_param_gather overlap_param_gather_with_optimizer_step pad_vocab_size
    padded_vocab_size patch_dim pipeline_model_parallel_layout pipeline_model_parallel_size q_lora_rank qk_head_dim
    qk_layernorm qk_pos_emb_head_dim quick_geglu rampup_batch_size recompute_activations recompute_granularity
    recompute_method recompute_modules recompute_num_layers reuse_grad_buf_for_mxfp8_param_ag rope_type
    rotary_interleaved rotary_percent seq_length sequence_parallel sgd_momentum softmax_type squared_relu
    step_batch_size_schedule suggested_communication_unit_size swiglu tensor_model_parallel_size tokenizer_model
    tokenizer_sentencepiece_legacy tokenizer_type torch_fsdp2_reshard_after_forward train_iters train_samples
    untie_embeddings_and_output_weights use_cpu_initialization use_custom_fsdp use_distributed_optimizer
    use_fused_weighted_squared_relu
    use_flash_attn use_legacy_models use_mcore_models use_megatron_fsdp use_precision_aware_optimizer use_rotary_position_embeddings
    use_torch_fsdp2 use_tp_pp_dp_mapping v_head_dim vocab_extra_ids vocab_file vocab_size weight_decay
    window_attn_skip_freq window_size
"""

MODELLED: Final = frozenset(_MODELLED.split())
"""Dests of options that are checked and modelled."""

_REASONS: Final[dict[str, str]] = {
    "used or refused by the parser of this program": """
        batch_size checkpoint_activations model_parallel_size use_checkpoint_args use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args warmup yaml_cfg
    """,
    "parsed by Megatron and not used": """
        ckpt_fully_parallel_save_deprecated data_impl
        deprecated_use_mcore_models disable_msc_deprecated dist_ckpt_format_deprecated enable_experimental
        lazy_mpu_init local_rank mmap_warmup moe_extended_tp onnx_safe use_dist_ckpt_deprecated
    """,
    "for inference, or evaluation by generation": """
        bert_embedder_type cache_mla_latents decode_only_cuda_graphs disable_chunked_prefill enable_chunked_prefill
        flash_decode inference_batch_times_seqlen_threshold inference_coordinator_port
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens inference_cuda_graph_scope
        inference_disable_ep_consensus inference_disable_triton_nvls_kernels inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_guaranteed_fraction inference_dynamic_batching_buffer_overflow_factor
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_chunk_size
        inference_dynamic_batching_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_requests_override
        inference_dynamic_batching_max_tokens inference_dynamic_batching_max_tokens_override
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_eviction_policy inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_unified_memory_level inference_fuse_tp_communication inference_grouped_gemm_backend
        inference_logging_step_interval inference_max_batch_size inference_max_requests inference_max_seq_length
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_rng_tracker
        inference_shards inference_text_gen_server_logging inference_use_synchronous_zmq_collectives
        inference_wandb_logging mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype max_tokens_to_oom
        mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill
        num_speculative_tokens output_bert_embeddings use_legacy_static_engine
    """,
    "for reinforcement learning, which is refused": """
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_default_temperature grpo_default_top_p grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step
        langrl_env_config langrl_external_server langrl_inference_server_conversation_template
        langrl_inference_server_type refit_method rl_calculate_intra_group_similarity rl_consumption_granularity
        rl_default_temperature rl_default_top_k rl_default_top_p rl_generation_batch_size rl_generation_lag
        rl_importance_sampling_truncation_coef rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_logprobs_is_correction
        rl_inference_model_unified_memory_level rl_inference_parsers rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode rl_num_parallel_generation_batches
        rl_num_parallel_generations rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training
        rl_offload_optimizer_during_inference rl_parallel_generation_tasks rl_partial_rollouts rl_persist_cuda_graphs
        rl_profile rl_profile_dir rl_prompts_per_eval rl_remove_kv_cache_during_training rl_reset_cuda_graphs
        rl_sequence_packing_algo rl_sequence_packing_bin_size rl_sequence_packing_max_sequences_per_bin
        rl_skip_bos_token rl_submission_granularity rl_training_cuda_graphs rl_use_sequence_packing
        rl_verify_model_weights_swap
    """,
    "for NCCL-EP, which is refused": """
        moe_ncclep_static_shape moe_ncclep_zero_copy
    """,
    "selects the stream for expert communication": """
        high_priority_a2a_comm_stream
    """,
    "settings of HybridEP's kernels": """
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_permute_fusion_into_hybridep
    """,
    "changes which tokens an expert gets, not their mean number": """
        moe_router_bias_update_rate moe_router_force_load_balancing moe_router_quantile_balancing_ema
        moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_token_drop_policy
    """,
    "covered by the assumption about --moe-use-upcycling or --moe-routing-trace-path": """
        moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
        moe_routing_trace_max_training_iters moe_upcycling_granularity
    """,
    "scales the MTP loss, or is derived from the layout": """
        mtp_loss_scaling_factor mtp_standalone
    """,
    "changes the values of the indexer of sparse attention": """
        dsa_indexer_k_norm_epsilon dsa_indexer_rope_interleaved
    """,
    "for other kinds of attention, which are refused": """
        kitchen_attention_backend mrope_section qk_clip_alpha qk_clip_threshold relative_attention_max_distance
        relative_attention_num_buckets
    """,
    "changes the values of scaling factors, not their number": """
        fp8_amax_compute_algo fp8_interval fp8_margin
    """,
    "for custom quantizers, which are refused": """
        fp4_quantizer_factory fp8_quantizer_factory
    """,
    "no longer used by Transformer Engine 2.11": """
        fp8_wgrad
    """,
    "order of operations of Megatron-FSDP, or its checkpoints": """
        fsdp_manual_registration gradient_reduce_div_fusion strict_fsdp_dtensor_load
    """,
    "order of copies between GPU and host, or ignored by Megatron": """
        overlap_cpu_optimizer_d2h_h2d pin_cpu_params use_torch_optimizer_for_cpu_offload
    """,
    "for offloaded states, which are refused, and for memory of the host": """
        activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads
    """,
    "size of a page, to which the number of rows of the pages is rounded": """
        moe_paged_stash_page_size
    """,
    "for models other than GPT, which are refused": """
        bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path
        classes_fraction data_per_class_fraction data_sharding dino_bottleneck_size
        dino_freeze_last_layer dino_head_hidden_size dino_local_crops_number dino_local_img_size dino_norm_last_layer
        dino_teacher_temp dino_warmup_teacher_temp dino_warmup_teacher_temp_epochs embedding_path evidence_data_path
        head_lr_mult ict_head_size ict_load indexer_batch_size indexer_log_interval iter_per_epoch
        mask_factor mask_prob mask_type num_channels num_classes query_in_block_prob
        retriever_report_topk_accuracies retriever_score_scaling retriever_seq_length retro_attention_gate
        retro_cyclic_train_iters retro_encoder_attention_dropout retro_encoder_hidden_dropout retro_encoder_layers
        retro_num_neighbors retro_num_retrieved_chunks retro_return_doc_ids retro_verify_neighbor_count retro_workdir
        sft_tokenizer_prompt_format swin_backbone_type titles_data_path use_one_sent_docs vision_backbone_type
        vision_pretraining_type
    """,
    "for distillation, which is refused": """
        logits_load_decode_threads logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
        logits_load_prefetch_factor logits_save_dtype logits_save_top_k logits_save_top_p logits_save_top_p_min_k
    """,
    "covered by the assumption about --tp-comm-overlap": """
        tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_cfg
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    """,
    "covered by the assumption about --use-nccl-ub, --use-sharp or --use-mup": """
        disable_symmetric_registration mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_width_mult sharp_enabled_group
    """,
    "covered by the assumption about --inprocess-restart": """
        inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache
        inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout
        inprocess_last_call_wait inprocess_max_iterations inprocess_monitor_process_interval
        inprocess_monitor_thread_interval inprocess_progress_watchdog_interval inprocess_soft_timeout
        inprocess_termination_grace_time
    """,
    "hyperparameters of the optimizer and its schedule": """
        adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr
        dump_param_to_param_group_map end_weight_decay hysteresis initial_loss_scale lion_beta1 lion_beta2 loss_scale_window lr
        lr_decay_iters lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_wsd_decay_iters
        lr_wsd_decay_samples lr_wsd_decay_style min_loss_scale min_lr muon_extra_scale_factor muon_momentum
        muon_scale_mode no_weight_decay_cond_type
        override_opt_param_scheduler start_weight_decay use_checkpoint_opt_param_scheduler weight_decay_incr_style
    """,
    "values of parameters and random numbers": """
        embedding_init_method_std init_method_std init_method_xavier_uniform offset_sampling_seed_by_dp_rank
        perform_initialization seed te_rng_tracker
    """,
    "values used inside a kernel": """
        apply_layernorm_1p disable_bf16_reduced_precision_matmul flash_attention_version glu_linear_offset layernorm_epsilon
        layernorm_zero_centered_gamma moe_shared_expert_glu_interleave_size mscale
        mscale_all_dim no_persist_layer_norm norm_epsilon rope_scaling_factor rotary_base rotary_scaling_factor
        rotary_seq_len_interpolation_factor use_rope_scaling yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int yarn_original_max_position_embeddings
    """,
    "order of communication calls, not their size": """
        align_param_gather async_tensor_model_parallel_allreduce delay_grad_reduce delay_param_gather
        distributed_timeout_minutes
        distributed_timeout_seconds_after_init enable_gloo_process_groups flight_recorder_dump_on_timeout
        flight_recorder_dump_path flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
        flight_recorder_include_stack_trace flight_recorder_trace_buffer_size high_priority_stream_groups
        use_gloo_process_groups use_ring_exchange_p2p
    """,
    "checkpoints, between iterations": """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_save async_strategy
        auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save ckpt_fully_parallel_save_process_group
        ckpt_load_validate_sharding_integrity ckpt_step dist_ckpt_format dist_ckpt_optim_fully_reshardable
        dist_ckpt_save_pre_mcore_014
        dist_ckpt_strictness dist_ckpt_workers distrib_optim_fully_reshardable_mem_efficient enable_msc
        exit_on_missing_checkpoint load_main_params_from_ckpt load_model_opt_format no_load_rng
        no_save_optim no_save_rng non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval
        override_ckpt_iteration replication replication_factor replication_jump save save_interval
        save_retain_interval save_tokens_per_expert_interval stream_ckpt_dequant use_persistent_ckpt_worker
        use_dist_ckpt verify_integrity
    """,
    "length of training, evaluation and interruptions": """
        adlr_autoresume adlr_autoresume_interval calc_ft_timeouts check_for_large_grads check_for_spiky_loss
        enable_ft_package error_injection_rate error_injection_type eval_interval eval_iters exit_duration_in_mins
        exit_interval exit_signal exit_signal_handler exit_signal_handler_for_dataloader
        exit_signal_handler_for_training fault_injector_delay_start_iteration fault_injector_fault_delay
        fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds
        fault_injector_num_ranks fault_injector_offset_seconds fault_injector_ranks fault_injector_seed
        ft_num_warmup_iters iterations_to_skip manual_gc_eval manual_gc_interval multiple_validation_sets
        phase_transition_iterations rerun_mode result_rejected_tracker_filename start_eval_at_iter test_mode
        train_sync_interval validation_set_names
    """,
    "data, and data loading on the host": """
        allow_ambiguous_pad_tokens data_args_path data_cache_path data_path dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load dataloader_type eod_mask_loss fim_data fim_eod_token fim_fragment_rate
        fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate
        fim_suffix_token mid_level_dataset_surplus mmap_bin_files mock_data num_dataset_builder_threads num_workers
        object_storage_cache_path per_dataset_sequences_path per_split_data_args_path reset_attention_mask
        renormalize_blend_weights reset_position_ids s3_cache_path sample_rate short_seq_prob split test_data_path train_data_path
        valid_data_path
    """,
    "text of tokens, not the vocabulary size": """
        chat_template legacy_tokenizer merge_file metadata_path null_tokenizer_eod_id null_tokenizer_pad_id
        special_tokens tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
        tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast
        tokenizer_hf_use_fast tokenizer_metadata tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_special_tokens trust_remote_code
    """,
    "logging and profiling": """
        app_tag_run_name app_tag_run_version barrier_with_L1_time config_logger_dir disable_straggler_on_startup
        enable_one_logger log_batch_size_to_tensorboard log_device_memory_used log_energy log_interval
        log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_memory_interval log_memory_to_tensorboard
        log_progress log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
        log_world_size_to_tensorboard logging_level memory_snapshot_path moe_per_layer_logging nvtx_ranges
        one_logger_async one_logger_entity one_logger_project one_logger_run_name profile profile_ranks profile_step_end
        profile_step_start pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
        pytorch_profiler_collect_shapes record_memory_history record_shapes straggler_ctrlr_port
        straggler_minmax_count tensorboard_dir tensorboard_log_interval tensorboard_queue_size timing_log_level
        timing_log_option use_pytorch_profiler wandb_entity wandb_exp_name wandb_project wandb_save_dir
    """,
}
"""By reason: dests that change neither memory nor communication of a training iteration."""

NO_EFFECT: Final = {dest: reason for reason, dests in _REASONS.items() for dest in dests.split()}
"""By dest: the reason that it has no effect."""
