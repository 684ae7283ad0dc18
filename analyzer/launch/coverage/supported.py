"""Options that change memory or messages and are not modelled: refused by name, or listed under assumptions.

Together with `option_effects`, which names the options that are modelled and those without effect, every option of
Megatron-LM 0.16.1 is in exactly one table. One that is in none (of a later release, or of a user's own checkout) is
listed under assumptions when it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import UnsupportedError
from analyzer.launch.coverage.option_effects import MODELLED, NO_EFFECT
from analyzer.launch.derive.reading import option

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_WITHOUT: Final = "leave it out to analyse the launch without it"
_DENSE: Final = "analyse a dense GPT, without it"

HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "DDP_impl": ("local",),
    "megatron_fsdp_main_params_dtype": ("fp32",),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion"),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "transformer_impl": ("transformer_engine", "local"),
    "distributed_backend": ("nccl",),
    "mlp_chunks_for_training": (1,),
}
"""Values that need no word, beside those of `_UNSET`."""

_UNSET: Final[tuple[object, ...]] = (None, False, 0, "", (), "none")

REFUSED: Final[dict[str, tuple[str, str]]] = {
    # models other than a GPT
    "is_hybrid_model": ("hybrids of Mamba and attention are not modelled", _DENSE),
    "hybrid_layer_pattern": ("hybrids of Mamba and attention are not modelled", _DENSE),
    "hybrid_override_pattern": ("hybrids of Mamba and attention are not modelled", _DENSE),
    "hybrid_attention_ratio": ("hybrids of Mamba and attention are not modelled", _DENSE),
    "hybrid_mlp_ratio": ("hybrids of Mamba and attention are not modelled", _DENSE),
    "spec": ("layers of another specification are not modelled", _WITHOUT),
    "retro_add_retriever": ("RETRO is not modelled", _DENSE),
    "retro_project_dir": ("RETRO is not modelled", _DENSE),
    "vision_pretraining": ("vision models are not modelled", _DENSE),
    "encoder_tensor_model_parallel_size": ("ranks of an encoder are not modelled", _WITHOUT),
    "encoder_pipeline_model_parallel_size": ("ranks of an encoder are not modelled", _WITHOUT),
    "pipeline_model_parallel_split_rank": ("ranks of an encoder are not modelled", _WITHOUT),
    "standalone_embedding_stage": ("a pipeline stage for the embedding alone is not modelled", _WITHOUT),
    # attention
    "experimental_attention_variant": ("this kind of attention is not modelled", _WITHOUT),
    "mtp_use_repeated_layer": ("one prediction layer for all depths is not modelled", _WITHOUT),
    "mtp_detach_heads": ("prediction heads cut off from the decoder are not modelled", _WITHOUT),
    "linear_attention_freq": ("linear attention is not modelled", _WITHOUT),
    "attention_output_gate": ("gated attention is not modelled", _WITHOUT),
    "qk_l2_norm": ("the L2 norm of queries and keys is not modelled", _WITHOUT),
    "qk_clip": ("clipping of attention logits is not modelled", _WITHOUT),
    "use_kitchen_attention": ("the attention of Kitchen is not modelled", _WITHOUT),
    "hybrid_context_parallel": ("context parallelism by sample is not modelled", _WITHOUT),
    "max_seqlen_per_dp_cp_rank": ("context parallelism by sample is not modelled", _WITHOUT),
    "position_embedding_type": ("this kind of position embedding is not modelled", "use learned_absolute, rope, yarn or none"),
    "transformer_impl": ("this implementation is for inference", "use transformer_engine or local"),
    "batch_invariant_mode": ("batch-invariant kernels are not modelled", _WITHOUT),
    # element types
    "fp8_e4m3": ("FP8 in the code of 2023 is not modelled", "analyse the launch in bf16, without it"),
    "fp8_hybrid": ("FP8 in the code of 2023 is not modelled", "analyse the launch in bf16, without it"),
    "fp8_output_proj": ("an output layer in fp8 is not modelled", _WITHOUT),
    "fp4_param": ("parameters stored in fp4 are not modelled", _WITHOUT),
    "fp4_param_gather": ("parameters stored in fp4 are not modelled", _WITHOUT),
    "te_precision_config_file": ("a precision for each module is not modelled", _WITHOUT),
    "kitchen_config_file": ("a precision for each module is not modelled", _WITHOUT),
    "kitchen_recipe_number": ("a precision for each module is not modelled", _WITHOUT),
    "embedding_weights_in_fp32": ("an embedding in fp32 is not modelled", _WITHOUT),
    "ddp_param_name_patterns_for_fp32_local_accumulation": ("gradients of mixed types are not modelled", _WITHOUT),
    # the feed-forward layer
    "use_te_activation_func": ("the activations of Transformer Engine are not modelled", _WITHOUT),
    "use_grouped_gemm_for_dense_mlp": ("grouped products in dense layers are not modelled", _WITHOUT),
    "mlp_chunks_for_training": ("a feed-forward layer in chunks is not modelled", _WITHOUT),
    "fused_residual_rmsnorm": ("the fused residual norm is not modelled", _WITHOUT),
    "use_grouped_gemm_for_shared_expert": ("grouped products in shared experts are not modelled", _WITHOUT),
    "moe_expert_rank_capacity_factor": ("a capacity for each rank is not modelled", _WITHOUT),
    # sharding and optimizers
    "enable_full_sharding_in_hsdp": ("sharding over instances is not modelled for this release", _WITHOUT),
    "megatron_fsdp_main_params_dtype": ("shards of other types are not modelled", "leave it at fp32"),
    "tensor_parallel_num_weight_shards": ("weights sharded beyond tensor parallelism are not modelled", _WITHOUT),
    "expert_tensor_parallel_num_weight_shards": ("weights sharded beyond tensor parallelism are not modelled", _WITHOUT),
    "optimizer": ("this optimizer is not modelled yet", "use --optimizer adam, sgd, lion or muon"),
    "freeze_all_layers": ("a frozen model is not modelled", _WITHOUT),
    "DDP_impl": ("torch's own data parallelism is not modelled", "use --DDP-impl local"),
    "use_contiguous_buffers_in_local_ddp": ("gradients outside a buffer are not modelled", _WITHOUT),
    # offloading, graphs, overlap
    "optimizer_cuda_graph": ("a graph of the optimizer step is not modelled", _WITHOUT),
    "moe_paged_stash": ("paging of the experts' activations is not modelled", _WITHOUT),
    "overlap_dispatch_backward_with_experts_wgrad": ("delayed weight gradients are not modelled", _WITHOUT),
    # training of another kind
    "skip_train": ("nothing is trained", _WITHOUT),
    "perform_rl_step": ("reinforcement learning is not modelled", _WITHOUT),
    "sft": ("packed sequences are not modelled", _WITHOUT),
    "dataloader_inter_document_masking": ("packed sequences are not modelled", _WITHOUT),
    "logits_save_dir": ("distillation is not modelled", _WITHOUT),
    "logits_load_dir": ("distillation is not modelled", _WITHOUT),
}
"""By dest: why it is refused where it is switched on, and what to do."""

ASSUMED: Final[dict[str, str]] = {
    "use_transformer_engine_op_fuser": "operations are counted as without it, either way",
    "tp_comm_overlap": "what is gathered into its buffers still counts beside them, so the prediction is slightly too high",
    "nccl_ub": "buffers registered with NCCL lie in a memory pool of their own, whose rounding is not counted (too low)",
    "fsdp_db_use_persist_buf_on_alloc_fail": "layers unlike the others are counted as gathered anew each time, so slightly too low",
    "megatron_fsdp_max_pool_double_buffer": "layers unlike the others are counted as gathered anew each time, so slightly too low",
    "megatron_fsdp_enable_fine_grained_param_gather": "parameters are counted as gathered layer by layer, so slightly too high",
    "keep_fp8_transpose_cache": "transposed copies of fp8 weights that outlive their layer are not counted, so too low",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "transposed copies of fp8 weights are not counted, so too low",
    "use_sharp": "memory that SHARP reserves is not counted, so device memory may be too low",
    "create_all_gather_group": "the buffers of its further communicators are not counted, so device memory is too low",
    "nccl_communicator_config_path": "the buffers of NCCL are counted with its own defaults, either way",
    "pipeline_model_parallel_comm_backend": "the buffers of the pipeline's communicators are counted as NCCL's, either way",
    "distributed_backend": "buffers are counted as if NCCL were used, so device memory is too high",
    "fake_process_group": "the buffers of NCCL are counted though a fake group has none, so device memory is too high",
    "symmetric_ar_type": "the symmetric buffers of its all-reduce are not counted, so the prediction is too low",
    "clone_scatter_output_in_embedding": "the embedding's whole output outlives its split, uncounted (too low)",
    "wgrad_deferral_limit": "every microbatch is counted as deferred, so the prediction is too high",
    "no_rope_freq": "rotary positions are counted in every layer, so the prediction is too high",
    "log_max_attention_logit": "the largest logit of each head is not counted, so the prediction is slightly too low",
    "disable_jit_fuser": "operations are still counted as fused, so the prediction is too low",
    "use_mup": "the multiplications that it adds are not counted, so the prediction is slightly too low",
    "mla_down_proj_fusion": "two down-projections are still counted, so the prediction is slightly too high",
    "moe_apply_probs_on_input": "the copy of the experts' input that it keeps is not counted, so the prediction is too low",
    "moe_enable_routing_replay": "the choices that it keeps are not counted, so the prediction is slightly too low",
    "moe_input_jitter_eps": "the noise that it keeps for backward is not counted, so the prediction is too low",
    "moe_router_force_biased": "routing is still taken to be as even as --info-moe-imbalance says, so the prediction is too low",
    "moe_router_fusion": "the router is still counted as unfused, so the prediction is slightly too high",
    "moe_routing_trace_path": "what it captures is not counted, so the prediction is too low",
    "moe_single_grouped_bias": "a bias for each expert is still counted, apart in rounding, so slightly either way",
    "moe_single_grouped_weight": "a weight for each expert is still counted, apart in rounding, so slightly either way",
    "moe_use_upcycling": "the dense model that it begins with is not counted, and may need more before the first iteration",
    "use_fused_weighted_squared_relu": "the activation is still counted as unfused, so the prediction is too high",
    "openai_gelu": "it is counted as the usual GELU, so the prediction may be too low for legacy models",
    "save_params_interval": "iterations in which it saves are not counted, and may need more",
    "save_activations_interval": "iterations in which it saves are not counted, and may need more",
    "save_wgrads_interval": "iterations in which it saves are not counted, and may need more",
    "save_dgrads_interval": "iterations in which it saves are not counted, and may need more",
    "eval_micro_batch_size": "evaluation with other microbatches is not counted, and may need more",
    "full_validation": "evaluation is not counted; it keeps no activations",
    "load": "a checkpoint found there brings optimizer states, and the first iteration then peaks like later ones",
    "pretrained_checkpoint": "the checkpoint is taken to fit the model",
    "inprocess_restart": "memory kept over a restart is not counted, so the prediction may be too low",
    "scatter_gather_tensors_in_pipeline": "it is parsed by Megatron and has no effect",
    "check_weight_hash_across_dp_replicas_interval": "iterations in which it compares replicas are not counted, and may need more",
    "gpu_sniff_test_interval": "iterations in which it tests the GPU are not counted, and may need more",
    "run_workload_inspector_server": "the memory of its server is not counted, so device memory may be too low",
}
"""By dest: what is assumed where it differs from Megatron's default, and in which direction that errs."""

_ON_BY_DEFAULT: Final = (
    "clone_scatter_output_in_embedding",
    "scatter_gather_tensors_in_pipeline",
    "use_contiguous_buffers_in_local_ddp",
)
"""Of both tables, the dests whose flag turns something off."""


def refuse_unmodelled(arguments: Arguments) -> None:
    """Raises UnsupportedError for the first option that is switched on and refused."""
    for dest, (reason, remedy) in REFUSED.items():
        if is_switched(arguments, dest):
            named = option(arguments, dest)
            value = arguments.get(dest)
            raise UnsupportedError(named if value is True else f"{named} {_shown(value)}", reason, remedy)


def assumptions_of(arguments: Arguments) -> tuple[str, ...]:
    """One sentence for each option that is given and not modelled in full, and for each that no table knows."""
    sentences = [f"{option(arguments, dest)}: {what}." for dest, what in ASSUMED.items() if is_switched(arguments, dest)]
    unknown = sorted(dest for dest in arguments.given if not is_known(dest))
    sentences += [f"{option(arguments, dest)} is not known here: whatever memory it needs is not counted." for dest in unknown]
    return tuple(sentences)


def is_known(dest: str) -> bool:
    """Whether one of the tables has the dest."""
    return dest in MODELLED or dest in REFUSED or dest in ASSUMED or dest in NO_EFFECT


def is_switched(arguments: Arguments, dest: str) -> bool:
    """Whether the value of an option in one of the tables asks for something."""
    value = arguments.get(dest)
    if dest in _ON_BY_DEFAULT:
        return value is False
    if isinstance(value, list):
        value = tuple(value)
    return value not in _UNSET and value not in HARMLESS.get(dest, ())


def _shown(value: object) -> str:
    """A value as it stands on a command line, cut where it is long."""
    words = " ".join(str(each) for each in value) if isinstance(value, list | tuple) else str(value)
    return words if len(words) <= 40 else words[:37] + "..."
