"""Optimizers, and sharding of model states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MuonSpec:
    """Muon: how and on which ranks matrices are orthogonalized."""

    layer_wise: bool = False
    """Unsharded parameters are distributed over replicas (`--optimizer dist_muon`)."""
    aligned: bool = False
    """Buffers are laid out so that each shard has full matrices; other parameters use the distributed optimizer (from 0.18 on)."""
    tensor_parallel: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """Orthogonalization of a tensor-parallel matrix (`--muon-tp-mode`): each shard alone, the full matrix on every rank, or
    the full matrix distributed over the ranks."""
    split_qkv: bool = True
    """Queries, keys and values are orthogonalized separately."""
    nesterov: bool = False
    steps: int = 5
    """Number of Newton-Schulz iterations."""
    iterates_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the Newton-Schulz iterates: bf16 with `--muon-fp32-matmul-prec medium`."""
    scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Optimizer of embeddings, the output layer and vectors."""


@dataclass(frozen=True, kw_only=True)
class OffloadSpec:
    """Optimizer states on the host, which also updates them (`--optimizer-cpu-offload`)."""

    fraction: float = 1.0
    """Fraction of the elements that is offloaded; parameters are offloaded unsplit until it is reached."""
    pinned_gradients: bool = True
    collected: bool = False
    """Python's garbage collection runs before the first iteration (`--manual-gc`)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer, its states and their sharding."""

    name: Literal["adam", "sgd", "muon", "lion"] = "adam"
    muon: MuonSpec | None = None
    """None for optimizers other than muon."""
    offload: OffloadSpec | None = None
    sgd_momentum: float = 0.9
    distributed: bool = False
    precision_aware: bool = False
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    fp8_recipe: str = "delayed"
    """`--fp8-recipe`, which the optimizer reads without FP8 too."""
    overlap_grad_reduce: bool = False
    aligned_grad_reduce: bool = True
    """All pipeline stages reduce gradients at the same time (`--no-align-grad-reduce` switches this off)."""
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    ddp_bucket_size: int | None = None
    ddp_num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    average_in_collective: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    clip_grad: float = 1.0
    weight_decay: float = 0.01
    log_num_zeros_in_grad: bool = False
    log_params_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """Fully sharded data parallelism: what is sharded over replicas, and how it is gathered."""

    implementation: Literal["megatron", "torch"]
    """`--use-megatron-fsdp` (before core 0.14 `--use-custom-fsdp`), or `--use-torch-fsdp2`."""
    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What Megatron-FSDP shards (`--data-parallel-sharding-strategy`). torch FSDP2 shards everything."""
    outer_sharding: bool = False
    """fp32 master weights and moments are also sharded over optimizer instances (`--outer-dp-sharding-strategy optim`)."""
    expert_instances: bool = True
    """With several optimizer instances, experts are sharded over their own replicas, not over those of the dense model."""
    main_gradients: str | None = None
    """Type in which gradients are accumulated (`--megatron-fsdp-main-grads-dtype`); None for that of the gradient buffer."""
    reduced_gradients: str | None = None
    """Type in which gradients are reduced (`--megatron-fsdp-grad-comm-dtype`); None for the type of main_gradients."""
    communication_unit_size: int | None = None
    """`--suggested-communication-unit-size` in elements; half of it is prefetched. None for Megatron's default."""
    double_buffer: bool = False
    """Unsharded layers use two persistent buffers (`--fsdp-double-buffer`, `--use-nccl-ub`)."""
    reshard_after_forward: bool = True
    """torch: parameters are freed after forward and gathered again for backward."""
    starts_from_meta: bool = False
    """`--init-model-with-meta-device`: the unsharded model is never on one GPU."""
    moments_from_start: bool = False
    """`--load` creates optimizer states before the first iteration, even if no checkpoint is found."""
    outside_layers_prefetches: bool = True
    """Modules outside layers prefetch layers in every forward, not only before the first backward."""
    outside_layers_stay: bool = False
    """Parameters outside layers stay unsharded between iterations."""
