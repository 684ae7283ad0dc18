"""Training iterations: batch, recomputation, activation offloading, CUDA graphs and other flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Batch sizes of an iteration."""

    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    microbatches: int
    """Microbatches per data-parallel rank, at the full global batch size."""
    first_microbatches: int
    """The same in the first iteration; fewer with `--rampup-batch-size`."""


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Activation recomputation."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    """With selective recomputation: core_attn, mlp, layernorm and others (`--recompute-modules`)."""
    distribute_saved_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadSpec:
    """Offloading of activations to host memory until their backward: of modules, or of the first layers."""

    layers: int = 0
    """Number of first layers with all activations offloaded (`--cpu-offloading-num-layers`)."""
    modules: tuple[str, ...] = ()
    """With `--fine-grained-activation-offloading`: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act."""
    min_elements: int = 1024 * 1024
    """Smaller tensors are not offloaded (`--min-offloaded-tensor-size`)."""
    cached_weights: bool = False
    """Weights that are cached in FP8 or FP4 are offloaded too, in 16 bit."""


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """CUDA graphs: kernels captured once and replayed, with a separate memory pool."""

    implementation: Literal["transformer_engine", "local"]
    """The implementation that captures them (`--cuda-graph-impl`)."""
    scope: tuple[str, ...] = ()
    """attn, mlp, moe, moe_router, moe_preprocess, or full_iteration; empty for full layers."""
    warmup_steps: int = 3
    """Iterations before the capture."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Other flags that affect memory or communication."""

    gradient_accumulation_fusion: bool = True
    attention_mask_in_dataloader: bool = True
    deterministic: bool = False
    calculate_per_token_loss: bool = False
    check_for_nan_in_loss_and_grad: bool = True
    tp_comm_overlap: bool = False
    defer_embedding_wgrad: bool = False
    wgrad_deferral_limit: int = 0
    """Number of calls of the output layer in an iteration whose weight gradients are deferred; 0 for all."""
    cublas_workspace_config: str | None = None
    """Environment variable CUBLAS_WORKSPACE_CONFIG."""
    cuda_device_max_connections: str | None = None
    allocator_config: str | None = None
    """Environment variable PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF."""
    use_cpu_initialization: bool = False
    empty_unused_memory_level: int = 0
    data_parallel_random_init: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    """The forward of one microbatch overlaps with the backward of another, layer by layer."""
    early_attention_backward: bool = False
    """With overlapped microbatches, the backward of a layer's attention runs before the forward of the other microbatch's experts
    (`--ep-overlap-early-attn-memory-release`)."""
    delay_wgrad_compute: bool = False
    """With overlapped microbatches, the weight gradients of a branch are computed after its activation gradients."""
    overlap_expert_gradients: bool = False
    """The weight gradients of routed experts are computed while gradients return from them
    (`--overlap-dispatch-backward-with-experts-wgrad`)."""
