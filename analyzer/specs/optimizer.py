"""Optimizers, and sharding of model states. `OPTIMIZERS` has the facts about each optimizer that the predictions depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal


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
    scalar_optimizer: str = "adam"
    """Optimizer of embeddings, the output layer and vectors, by its name in `OPTIMIZERS`."""


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

    name: str = "adam"
    """`OptimizerFacts.name`."""
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

    @property
    def facts(self) -> OptimizerFacts:
        """The facts about this optimizer. Raises KeyError for one that is not modelled."""
        return OPTIMIZERS[self.name]

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """Types of the states of each element that this optimizer updates, without the master weight."""
        return self.facts.states(self)


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What the predictions need to know about an optimizer. Each one updates fp32 master weights of 16-bit parameters.

    The defaults are those of an optimizer that Megatron creates without sharding, and whose kernels update parameters in place.
    """

    name: str
    """Its name in reports."""
    title: str
    """Its name in sentences."""
    states: Callable[[OptimizerSpec], tuple[str, ...]]
    """The types of the states of each element, such as ("fp32", "fp32"), without the master weight."""
    updates: Literal["in place", "one by one"] = "in place"
    """One by one: the update of a parameter is a temporary tensor, before it is applied. The order of allocations is not known."""
    orthogonalizes: bool = False
    """It updates matrices only, by products of them, as `MuonSpec` says. `MuonSpec.scalar_optimizer` updates other parameters."""
    layer_wise: bool = False
    """Unsharded parameters are distributed over replicas, also without `--use-distributed-optimizer`."""
    sharding: Literal["distributed", "layer-wise"] | None = None
    """What `--use-distributed-optimizer` selects: Megatron's distributed or layer-wise optimizer. None: Megatron refuses it."""
    fsdp: bool = False
    """Model states with Megatron-FSDP and torch FSDP2 are modelled."""
    precision_aware: bool = False
    """`--use-precision-aware-optimizer` is allowed."""
    emerging: bool = False
    """Megatron has it from the package emerging_optimizers."""
    not_modelled_since: tuple[str, str] | None = None
    """The first release in which it is not modelled, and the reason."""
    step_tensors_of_torch: tuple[str, ...] = ()
    """Names of fp32 tensors of all elements that the step of torch's implementation creates, which is used if there is no other."""
    not_timed: tuple[str, ...] = ()
    """Parts of its step whose time is not modelled."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about its memory, as in a report."""


_ADAM: Final = OptimizerFacts(
    name="adam",
    title="Adam",
    states=lambda spec: (spec.exp_avg_dtype, spec.exp_avg_sq_dtype),
    sharding="distributed",
    fsdp=True,
    precision_aware=True,
    # `torch._foreach_sqrt` of all second moments (torch/optim/adam.py, `_multi_tensor_adam`, 2.8)
    step_tensors_of_torch=("square roots of torch's Adam",),
)
_SGD: Final = OptimizerFacts(
    name="sgd",
    title="SGD",
    states=lambda spec: ("fp32",) if spec.sgd_momentum else (),
    fsdp=True,
)
# Chen et al. 2023; megatron/core/optimizer/__init__.py of 0.17, the first release with Lion. From 0.18 on it updates embeddings
# and vectors with Adam by default (`_EMERGING_OPTIMIZERS`).
_LION: Final = OptimizerFacts(
    name="lion",
    title="Lion",
    states=lambda _: ("fp32",),
    updates="one by one",
    emerging=True,
    not_modelled_since=("0.18", "Lion together with Adam, as in this release, is not modelled"),
)
# Jordan et al. 2024; megatron/core/optimizer/muon.py, 0.16.1
_MUON: Final = OptimizerFacts(
    name="muon",
    title="Muon",
    states=lambda _: ("fp32",),
    updates="one by one",
    orthogonalizes=True,
    sharding="layer-wise",
    emerging=True,
    not_timed=("the orthogonalization of Muon",),
    assumptions=("temporary tensors of Muon are those of emerging_optimizers in its releases up to 2026",),
)
OPTIMIZERS: Final[Mapping[str, OptimizerFacts]] = {
    "adam": _ADAM,
    "sgd": _SGD,
    "lion": _LION,
    "muon": _MUON,
    "dist_muon": replace(_MUON, layer_wise=True),
}
"""By the value of `--optimizer`. Other optimizers are refused."""


def names_of_optimizers(*, without: str = "") -> str:
    """The names of the optimizers that are modelled, for messages: 'adam, sgd, lion or muon'. `without`: a name to leave out."""
    *names, last = dict.fromkeys(facts.name for facts in OPTIMIZERS.values() if facts.name != without)
    return f"{', '.join(names)} or {last}"


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
