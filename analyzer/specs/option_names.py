"""Megatron's flags by dest."""

from __future__ import annotations

from typing import Final

_FLAGS: Final = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "clone_scatter_output_in_embedding": "--no-clone-scatter-output-in-embedding",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "nccl_ub": "--use-nccl-ub",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "pad_vocab_size": "--no-pad-vocab-size",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
"""Flags that are not the dest with dashes."""


def flag_of(dest: str) -> str:
    """The flag of `dest`: '--tensor-model-parallel-size' for 'tensor_model_parallel_size'."""
    return _FLAGS.get(dest) or "--" + dest.replace("_", "-")
