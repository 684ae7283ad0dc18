"""MoE layers: which layers have experts, and how tokens reach them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AUXILIARY_LOSSES: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing types that add a loss, each with its coefficient."""


@dataclass(frozen=True, kw_only=True)
class FlexSpec:
    """The library that the flex dispatcher sends tokens with."""

    backend: Literal["deepep", "hybridep"] = "deepep"
    sms: int = 20
    """Multiprocessors that DeepEP's kernels take (`--moe-deepep-num-sms`)."""
    nvlink_ranks: int = 8
    """Ranks of a group that HybridEP takes to reach each other over NVLink."""


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Mixture of experts: which layers have it, and how tokens reach their experts."""

    num_experts: int
    topk: int
    ffn_hidden_size: int
    """`--moe-ffn-hidden-size`, of one expert."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it is a mixture (`--moe-layer-freq` unrolled)."""
    shared_ffn_hidden_size: int | None = None
    """`--moe-shared-expert-intermediate-size`: the total width of the shared experts."""
    shared_overlap: bool = False
    shared_gate: bool = False
    grouped_gemm: bool = False
    legacy_grouped_gemm: bool = False
    """The experts of one layer in two fused weights, without Transformer Engine."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    flex: FlexSpec | None = None
    """Of the flex dispatcher; None for the others."""
    permute_fusion: bool = False
    adds_by_index: bool = False
    """Rows of experts are added up to tokens by an operation that keeps them (`--deterministic-mode`, from 0.15 on)."""
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    pad_for_quantization: bool = False
    """The router pads each expert's tokens to a multiple that FP8 products need (`--moe-router-padding-for-quantization`)."""
    router_dtype: Literal["fp32", "fp64"] | None = None
    """None: the router works in the parameters' type."""
    load_balancing: tuple[str, ...] = ("aux_loss",)
    aux_loss_coeff: float = 0.0
    """Sum of the coefficients; 0 switches the loss off."""
    z_loss_coeff: float = 0.0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    latent_size: int | None = None
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean (`--info-moe-imbalance`)."""
