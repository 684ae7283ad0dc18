"""Optimizers and how states are sharded, as a launch asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MuonSpec:
    """Muon: how matrices are orthogonalized, and who does so."""

    layer_wise: bool = False
    """Whole parameters are shared out among replicas (`--optimizer dist_muon`)."""
    aligned: bool = False
    """Buffers are laid out so: a shard holds whole matrices, and everything else is the distributed optimizer's (0.18 on)."""
    tensor_parallel: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """What is orthogonalized of a split matrix (`--muon-tp-mode`): its part, or all of it on every rank, or all of it together."""
    split_qkv: bool = True
    """Queries, keys and values one by one."""
    nesterov: bool = False
    steps: int = 5
    """Of the Newton-Schulz iteration."""
    iterates_dtype: Literal["bf16", "fp32"] = "bf16"
    """`--muon-fp32-matmul-prec medium` iterates in bf16."""
    scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Of embeddings, the output layer and vectors."""


@dataclass(frozen=True, kw_only=True)
class OffloadSpec:
    """Optimizer states on the host, where the step is taken for them (`--optimizer-cpu-offload`)."""

    fraction: float = 1.0
    """Of the elements; whole parameters go, until it is reached."""
    pinned_gradients: bool = True
    collected: bool = False
    """Python's garbage is collected before the first iteration (`--manual-gc`)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Optimizer states and how they are sharded."""

    name: Literal["adam", "sgd", "muon", "lion"] = "adam"
    muon: MuonSpec | None = None
    """With muon, and with it alone."""
    offload: OffloadSpec | None = None
    sgd_momentum: float = 0.9
    distributed: bool = False
    precision_aware: bool = False
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    overlap_grad_reduce: bool = False
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
    """Fully sharded data parallelism: what replicas share out among themselves, and how it is gathered."""

    implementation: Literal["megatron", "torch"]
    """`--use-megatron-fsdp` (before core 0.14 `--use-custom-fsdp`), or `--use-torch-fsdp2`."""
    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What is sharded beside fp32 weights and moments. torch shards everything."""
    outer_sharding: bool = False
    """fp32 weights and moments are sharded over the instances of the optimizer too (`--outer-dp-sharding-strategy optim`)."""
    main_gradients: str | None = None
    """Type in which gradients are summed (`--megatron-fsdp-main-grads-dtype`); None is that of the gradient buffer."""
    reduced_gradients: str | None = None
    """Type in which they are collected and sent (`--megatron-fsdp-grad-comm-dtype`); None is that in which they are summed."""
    communication_unit_size: int | None = None
    """`--suggested-communication-unit-size`, elements; half of it is gathered ahead. None is Megatron's default."""
    double_buffer: bool = False
    """Unsharded layers lie in two persistent buffers (`--fsdp-double-buffer`, `--use-nccl-ub`)."""
    reshard_after_forward: bool = True
    """With torch: parameters are dropped after forward and gathered again for backward."""
    starts_from_meta: bool = False
    """`--init-model-with-meta-device`: the whole model never lies on one GPU."""
    moments_from_start: bool = False
    """`--load` makes optimizer states before the first iteration, also where no checkpoint is found."""
    outside_layers_prefetches: bool = True
    """Modules outside layers start gathering layers in every forward, not only before the first backward."""
    outside_layers_stay: bool = False
    """Parameters outside layers stay unsharded between iterations."""
