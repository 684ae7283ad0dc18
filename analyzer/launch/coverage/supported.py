"""Options that change memory or communication and are not modelled: they are refused, or listed as assumptions.

Every option of the known Megatron-LM releases is in exactly one table of this module or of `option_effects`, which has the
options that are modelled and those without effect. An option in none of them (of a later release, or of a modified checkout) is
listed as an assumption if it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import UnsupportedError
from analyzer.launch.coverage.later_options import refuse_later
from analyzer.launch.coverage.option_effects import MODELLED, NO_EFFECT
from analyzer.launch.coverage.script_effects import OF_SCRIPTS
from analyzer.launch.coverage.script_effects import REFUSED as REFUSED_IN_SCRIPTS
from analyzer.launch.derive.model.hybrid import is_hybrid
from analyzer.launch.derive.reading import option
from analyzer.specs.optimizer import OPTIMIZERS, names_of_optimizers

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_WITHOUT: Final = "leave it out to analyze the launch without it"
_OTHER_MODEL: Final = "models with it cannot be analyzed; give the launch of a GPT without it"

MODELLED_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "DDP_impl": ("local",),
    "experimental_attention_variant": ("gated_delta_net", "dsa"),
    "megatron_fsdp_main_params_dtype": ("fp32",),
    "optimizer": tuple(OPTIMIZERS),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "transformer_impl": ("transformer_engine", "local"),
    "distributed_backend": ("nccl",),
    "mlp_chunks_for_training": (1,),
    "video_temporal_patch_size": (1,),
    "spec": (
        ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
        ("megatron.core.models.mamba.mamba_layer_specs", "hybrid_stack_spec"),
        ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ),
}
"""By dest of `REFUSED` or `ASSUMED`: values that are modelled, in addition to those of `_UNSET`."""

_UNSET: Final[tuple[object, ...]] = (None, False, 0, "", (), "none")

REFUSED: Final[dict[str, tuple[str, str]]] = {
    # models other than a GPT
    "retro_add_retriever": ("RETRO is not modelled", _OTHER_MODEL),
    "retro_project_dir": ("RETRO is not modelled", _OTHER_MODEL),
    "vision_pretraining": ("vision models are not modelled", _OTHER_MODEL),
    "encoder_tensor_model_parallel_size": ("encoder ranks are not modelled", _WITHOUT),
    "encoder_pipeline_model_parallel_size": ("encoder ranks are not modelled", _WITHOUT),
    "pipeline_model_parallel_split_rank": ("encoder ranks are not modelled", _WITHOUT),
    "standalone_embedding_stage": ("a separate pipeline stage for the embedding is not modelled", _WITHOUT),
    # attention
    "experimental_attention_variant": ("this attention variant is not modelled", "use gated_delta_net or dsa, or leave it out"),
    "mtp_use_repeated_layer": ("one MTP layer for all depths is not modelled", _OTHER_MODEL),
    "mamba_training_ssm_states_dtype": ("states of Mamba layers in another type are not modelled", _WITHOUT),
    "mtp_hybrid_override_pattern": ("this option for old checkpoints is not modelled", "write / and the MTP layers in the pattern"),
    "mtp_detach_heads": ("MTP heads that are detached from the decoder are not modelled", _OTHER_MODEL),
    "qk_clip": ("clipping of attention logits is not modelled", _WITHOUT),
    "use_kitchen_attention": ("Kitchen attention is not modelled", _OTHER_MODEL),
    "hybrid_context_parallel": ("context parallelism per sample is not modelled", _WITHOUT),
    "max_seqlen_per_dp_cp_rank": ("context parallelism per sample is not modelled", _WITHOUT),
    "position_embedding_type": ("this position embedding is not modelled", "use learned_absolute, rope, yarn or none"),
    "transformer_impl": ("implementations for inference are not modelled", "use transformer_engine or local"),
    "batch_invariant_mode": ("batch-invariant kernels are not modelled", _WITHOUT),
    # element types
    "fp8_e4m3": ("FP8 in the code of 2023 is not modelled", "analyse the launch in bf16, without it"),
    "fp8_hybrid": ("FP8 in the code of 2023 is not modelled", "analyse the launch in bf16, without it"),
    "fp4_param": ("parameters stored in FP4 are not modelled", _WITHOUT),
    "te_precision_config_file": ("a separate precision for each module is not modelled", _WITHOUT),
    "kitchen_config_file": ("a separate precision for each module is not modelled", _WITHOUT),
    "kitchen_recipe_number": ("a separate precision for each module is not modelled", _WITHOUT),
    "ddp_param_name_patterns_for_fp32_local_accumulation": ("gradients of mixed types are not modelled", _WITHOUT),
    # FFN layers
    "use_te_activation_func": ("activation functions of Transformer Engine are not modelled", _WITHOUT),
    "use_grouped_gemm_for_dense_mlp": ("grouped GEMMs in dense layers are not modelled", _WITHOUT),
    "mlp_chunks_for_training": ("chunked FFN layers are not modelled", _WITHOUT),
    "fused_residual_rmsnorm": ("the fused residual norm is not modelled", _WITHOUT),
    "use_grouped_gemm_for_shared_expert": ("grouped GEMMs in shared experts are not modelled", _WITHOUT),
    "moe_token_dropping": ("Megatron-LM core 0.5 and 0.6 refuse it", "leave it out"),
    # sharding and optimizers
    "enable_full_sharding_in_hsdp": ("sharding over optimizer instances is not modelled for this release", _WITHOUT),
    "megatron_fsdp_main_params_dtype": ("shards of other types are not modelled", "use fp32"),
    "tensor_parallel_num_weight_shards": ("weights sharded beyond tensor parallelism are not modelled", _WITHOUT),
    "expert_tensor_parallel_num_weight_shards": ("weights sharded beyond tensor parallelism are not modelled", _WITHOUT),
    "optimizer": ("this optimizer is not modelled", f"use --optimizer {names_of_optimizers()}"),
    "freeze_all_layers": ("a frozen model is not modelled", _WITHOUT),
    # offloading, graphs, overlap
    "optimizer_cuda_graph": ("a CUDA graph of the optimizer step is not modelled", _WITHOUT),
    # other kinds of training
    "skip_train": ("training is skipped", _WITHOUT),
    "perform_rl_step": ("reinforcement learning is not modelled", _WITHOUT),
    "logits_save_dir": ("distillation is not modelled", _WITHOUT),
    "logits_load_dir": ("distillation is not modelled", _WITHOUT),
}
"""By dest: fault and remedy of options that are refused."""

MODELLED_IN_HYBRIDS: Final = frozenset({"mtp_use_repeated_layer"})
"""Dests of `REFUSED` that are modelled for hybrid models."""

_UNEQUAL_LAYERS: Final = (
    "layers that differ from the others are assumed to use temporary buffers, so the prediction is slightly too low"
)

ASSUMED: Final[dict[str, str]] = {
    "spec": "layers are those of the other options; what the specification changes is not counted",
    "model_spec": "layers are those of the other options; what the specification changes is not counted",
    "qk_l2_norm": "the copies of normalized queries and keys are not counted, so the prediction is too low",
    "DDP_impl": "gradients are counted in Megatron's contiguous buffers, so the prediction may be slightly too high or too low",
    "use_contiguous_buffers_in_local_ddp": "gradients are counted in contiguous buffers, so their rounding may differ",
    "sft": "unpacked sequences of the full length are counted, so the prediction is slightly too low",
    "dataloader_inter_document_masking": "unpacked sequences are counted, so the prediction is slightly too low",
    "use_transformer_engine_op_fuser": "operations are counted as if it were not set, so the prediction may be too high or too low",
    "tp_comm_overlap": "gathered tensors are counted in addition to its buffers, so the prediction is slightly too high",
    "nccl_ub": "rounding in the memory pool of buffers registered with NCCL is not counted, so the prediction is too low",
    "fsdp_db_use_persist_buf_on_alloc_fail": _UNEQUAL_LAYERS,
    "megatron_fsdp_max_pool_double_buffer": _UNEQUAL_LAYERS,
    "megatron_fsdp_enable_fine_grained_param_gather": "gathering by layer is assumed, so the prediction is slightly too high",
    "embedding_weights_in_fp32": "the word embedding is counted with 16 bits, so the prediction is too low",
    "keep_fp8_transpose_cache": "FP8 weight transposes kept after their layer are not counted, so the prediction is too low",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "kept FP8 weight transposes are not counted, so the prediction is too low",
    "use_sharp": "memory reserved by SHARP is not counted, so device memory may be too low",
    "create_all_gather_group": "NCCL buffers of the additional communicators are not counted, so device memory is too low",
    "nccl_communicator_config_path": "NCCL buffers are counted with default settings, so device memory may be too high or too low",
    "pipeline_model_parallel_comm_backend": "NCCL communicators are assumed, so device memory may be too high or too low",
    "distributed_backend": "NCCL buffers are counted, so device memory is too high",
    "fake_process_group": "NCCL buffers are counted, and a fake process group has none, so device memory is too high",
    "symmetric_ar_type": "symmetric all-reduce buffers are not counted, so the prediction is too low",
    "clone_scatter_output_in_embedding": "the unsplit embedding output is kept and not counted, so the prediction is too low",
    "no_rope_freq": "RoPE is assumed in every layer, so the prediction is too high",
    "log_max_attention_logit": "the maximum logit of each head is not counted, so the prediction is slightly too low",
    "disable_jit_fuser": "operations are assumed to be fused, so the prediction is too low",
    "use_mup": "the additional multiplications are not counted, so the prediction is slightly too low",
    "mla_down_proj_fusion": "two separate down-projections are counted, so the prediction is slightly too high",
    "moe_apply_probs_on_input": "the saved copy of the expert input is not counted, so the prediction is too low",
    "moe_enable_routing_replay": "the recorded expert choices are not counted, so the prediction is slightly too low",
    "moe_input_jitter_eps": "the noise saved for backward is not counted, so the prediction is too low",
    "moe_router_force_biased": "routing is assumed to have the imbalance of --info-moe-imbalance, so the prediction is too low",
    "moe_router_fusion": "the router is assumed to be unfused, so the prediction is slightly too high",
    "moe_routing_trace_path": "captured data are not counted, so the prediction is too low",
    "moe_single_grouped_bias": "separate biases are counted, so rounding of the prediction may be slightly too high or too low",
    "moe_single_grouped_weight": "separate weights are counted, so rounding of the prediction may be slightly too high or too low",
    "moe_use_upcycling": "the dense model that is converted is not counted, so memory before the first iteration may be too low",
    "openai_gelu": "the standard GELU is assumed, so the prediction may be too low for legacy models",
    "save_params_interval": "iterations that save tensors are not counted, and may need more memory",
    "save_activations_interval": "iterations that save tensors are not counted, and may need more memory",
    "save_wgrads_interval": "iterations that save tensors are not counted, and may need more memory",
    "save_dgrads_interval": "iterations that save tensors are not counted, and may need more memory",
    "eval_micro_batch_size": "evaluation with this micro-batch size is not counted, and may need more memory",
    "full_validation": "evaluation is not counted; it saves no activations for backward",
    "load": "if it has a checkpoint, optimizer states exist before the first iteration, which then has the peak of later ones",
    "pretrained_checkpoint": "the checkpoint is assumed to match the model",
    "inprocess_restart": "memory kept across a restart is not counted, so the prediction may be too low",
    "scatter_gather_tensors_in_pipeline": "Megatron parses it and does not use it",
    "check_weight_hash_across_dp_replicas_interval": "iterations that compare replicas are not counted, and may need more memory",
    "gpu_sniff_test_interval": "iterations that test the GPU are not counted, and may need more memory",
    "run_workload_inspector_server": "the memory of the server is not counted, so device memory may be too low",
}
"""By dest: the assumption if it is set, and the direction of the error."""

_ON_BY_DEFAULT: Final = (
    "clone_scatter_output_in_embedding",
    "scatter_gather_tensors_in_pipeline",
    "use_contiguous_buffers_in_local_ddp",
)
"""Dests of both tables whose flag turns something off."""


def refuse_unmodelled(arguments: Arguments) -> None:
    """Raises UnsupportedError for the first option that the launch sets and that is in `REFUSED` or that `refuse_later` refuses."""
    for dest, (reason, remedy) in {**REFUSED, **REFUSED_IN_SCRIPTS}.items():
        if dest in arguments.given and is_switched(arguments, dest) and not (dest in MODELLED_IN_HYBRIDS and is_hybrid(arguments)):
            named = option(arguments, dest)
            value = arguments.get(dest)
            raise UnsupportedError(named if value is True else f"{named} {_shown(value)}", reason, remedy)
    for dest in sorted(arguments.given):
        if not is_known(dest) and is_switched(arguments, dest):
            refuse_later(option(arguments, dest), ())


def assumptions_of(arguments: Arguments) -> tuple[str, ...]:
    """One sentence for each set option of `ASSUMED`, and for each given option that is in no table."""
    sentences = [f"{option(arguments, dest)}: {what}." for dest, what in ASSUMED.items() if is_switched(arguments, dest)]
    sentences += [
        f"The {arguments.source} sets {option(arguments, dest)} by default, which is not counted: {reason}."
        for dest, (reason, _) in REFUSED.items()
        if dest not in arguments.given and is_switched(arguments, dest)
    ]
    unknown = sorted(dest for dest in arguments.given if not is_known(dest))
    sentences += [f"{option(arguments, dest)} is not known to this program: its memory is not counted." for dest in unknown]
    return tuple(sentences)


def is_known(dest: str) -> bool:
    """Whether the dest is in one of the tables."""
    return dest in OF_SCRIPTS or dest in MODELLED or dest in REFUSED or dest in ASSUMED or dest in NO_EFFECT


def is_switched(arguments: Arguments, dest: str) -> bool:
    """Whether an option of `REFUSED` or `ASSUMED` is set to a value that is not modelled."""
    value = arguments.get(dest)
    if dest in _ON_BY_DEFAULT:
        return value is False
    if isinstance(value, list):
        value = tuple(value)
    return value not in _UNSET and value not in MODELLED_VALUES.get(dest, ())


def _shown(value: object) -> str:
    """A value as on a command line, shortened to 40 characters."""
    words = " ".join(str(each) for each in value) if isinstance(value, list | tuple) else str(value)
    return words if len(words) <= 40 else words[:37] + "..."
