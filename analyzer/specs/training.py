"""One training iteration: batch, recomputation, activation offloading, CUDA graphs and other flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Samples of one iteration."""

    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    microbatches: int
    """For each data-parallel replica, at the full global batch."""
    first_microbatches: int
    """In the first iteration: fewer with `--rampup-batch-size`."""


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Activation recomputation."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    """With selective: core_attn, mlp, layernorm …"""
    distribute_saved_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadSpec:
    """Activations that wait for their backward in host memory: of parts of layers, or of the first so many layers."""

    layers: int = 0
    """Whole layers (`--cpu-offloading-num-layers`)."""
    modules: tuple[str, ...] = ()
    """Of `--fine-grained-activation-offloading`: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act."""
    min_elements: int = 1024 * 1024
    """Smaller tensors stay (`--min-offloaded-tensor-size`)."""
    last_stays: bool = True
    """The last layer before the loss stays, since its backward comes next; not so where another microbatch's does."""


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """CUDA graphs: kernels recorded once and replayed, in memory that stays theirs."""

    implementation: Literal["transformer_engine", "local"]
    """Who captures (`--cuda-graph-impl`)."""
    scope: tuple[str, ...] = ()
    """attn, mlp, moe, moe_router, moe_preprocess, or full_iteration; nothing is whole layers."""
    warmup_steps: int = 3
    """Iterations without graphs before they are captured."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Everything else that decides about bytes or messages."""

    gradient_accumulation_fusion: bool = True
    attention_mask_in_dataloader: bool = True
    deterministic: bool = False
    calculate_per_token_loss: bool = False
    check_for_nan_in_loss_and_grad: bool = True
    tp_comm_overlap: bool = False
    defer_embedding_wgrad: bool = False
    cublas_workspace_config: str | None = None
    """The environment's CUBLAS_WORKSPACE_CONFIG."""
    cuda_device_max_connections: str | None = None
    allocator_config: str | None = None
    """The environment's PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF."""
    use_cpu_initialization: bool = False
    empty_unused_memory_level: int = 0
    data_parallel_random_init: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    """The forward of a microbatch and the backward of another run side by side, layer by layer."""
    early_attention_backward: bool = False
    """There a layer's attention goes backward before the other one's experts run (`--ep-overlap-early-attn-memory-release`)."""
    delay_wgrad_compute: bool = False
    """There weight gradients of a branch are computed once it has been through backward."""
