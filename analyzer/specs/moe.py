"""MoE layers: experts, router and token dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

AUXILIARY_LOSSES: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing types with a loss, each with its coefficient."""


@dataclass(frozen=True, kw_only=True)
class FlexSpec:
    """The communication library of the flex dispatcher."""

    backend: Literal["deepep", "hybridep"] = "deepep"
    sms: int = 20
    """Multiprocessors used by DeepEP's kernels (`--moe-deepep-num-sms`)."""
    nvlink_ranks: int = 8
    """Ranks in an NVLink domain of HybridEP."""
    equalizes: bool = False
    """The ranks of HybridEP agree on the largest number of their tokens (`--moe-hybridep-pad-uneven-dispatch-inputs`)."""


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """MoE layers: experts, router and token dispatcher."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    """FFN width of one expert (`--moe-ffn-hidden-size`)."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it is an MoE layer (`--moe-layer-freq`)."""
    shared_ffn_hidden_size: int | None = None
    """Total FFN width of the shared experts (`--moe-shared-expert-intermediate-size`)."""
    shared_overlap: bool = False
    shared_gate: bool = False
    grouped_gemm: bool = False
    legacy_grouped_gemm: bool = False
    """The experts of a layer have two fused weights, without Transformer Engine."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    flex: FlexSpec | None = None
    """None for dispatchers other than flex."""
    permute_fusion: bool = False
    adds_by_index: bool = False
    """Expert outputs are summed by `index_add_`, which saves them for backward (`--deterministic-mode`, from 0.15 on)."""
    sorts_positions: bool = False
    """An unfused permutation sorts all pairs of expert and token, and saves their positions (`permute`, from 0.17 on)."""
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    pad_for_quantization: bool = False
    """The router pads the tokens of each expert to the multiple that FP8 GEMMs need (`--moe-router-padding-for-quantization`)."""
    fused_operations: bool = False
    """Rows of experts are padded for fused operations, to a multiple of 256 (`--use-transformer-engine-op-fuser`, from 0.18 on)."""
    router_dtype: Literal["fp32", "fp64"] | None = None
    """Type of the router logits; None for the type of the parameters."""
    load_balancing: tuple[str, ...] = ("aux_loss",)
    aux_loss_coeff: float = 0.0
    """Sum of the coefficients; 0 turns the losses off."""
    z_loss_coeff: float = 0.0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    hash_layers: int = 0
    """The first layers, in which a table of all tokens chooses the experts: in DeepSeek-V4."""
    latent_size: int | None = None
    rank_capacity: float | None = None
    """Rows that the flex dispatcher allocates for the experts of a rank, relative to their mean number
    (`--moe-expert-rank-capacity-factor`); None: as many as arrive are allocated."""
    page_factor: float | None = None
    """Rows of the pages to which the experts copy what they save (`--moe-paged-stash`), relative to the mean number of rows of a
    layer; None without pages."""
    imbalance: float = 1.0
    """Tokens of the experts of the highest-memory rank, relative to the mean (`--info-moe-imbalance`)."""

    def capacity(self, tokens: int, *, split: int = 1) -> int:
        """Tokens that an expert accepts from a rank with `tokens` tokens; valid only with a capacity factor.

        `split`: parts of an expert that are counted as experts. Source: `get_capacity`
        (megatron/core/transformer/moe/moe_utils.py), with its order of operations.
        """
        assert self.capacity_factor is not None
        return ceil(tokens * self.topk / (self.num_experts * split) * self.capacity_factor)
