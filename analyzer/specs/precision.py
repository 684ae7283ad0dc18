"""Element types of parameters, gradients and GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
ONE_SCALE: Final = ("delayed", "tensorwise")
"""Recipes with one scale per tensor."""


@dataclass(frozen=True, kw_only=True)
class Fp8Spec:
    """FP8 or FP4 GEMMs of Transformer Engine's linear layers. Norms and the embedding use 16 bit."""

    format: Literal["e4m3", "hybrid", "e2m1"]
    """hybrid: activation gradients in e5m2, with the same size as e4m3; e2m1: FP4, with the recipe nvfp4."""
    recipe: Fp8Recipe = "delayed"
    stored_parameters: bool = False
    """Weights of these layers are stored and gathered in FP8 (`--fp8-param-gather`) or FP4 (`--fp4-param-gather`)."""
    layers_at_start_in_16_bit: int = 0
    """Layers at the start that use 16 bit (`--first-last-layers-bf16`)."""
    layers_at_end_in_16_bit: int = 0
    amax_history_len: int = 1
    """Length of the amax history of each scaling factor, with the delayed recipe."""
    output_layer: bool = False
    """The output layer is one of these linear layers too (`--fp8-output-proj`). Its weight is stored in 16 bit."""
    keeps_transposes: bool = True
    """Copies of weights along columns are kept between microbatches; else each data gradient makes its own (Transformer Engine of
    AMD, `keep_fp8_weight_transpose_cache`)."""
    attention: bool = False
    """Core attention reads queries, keys and values in FP8 (`fp8_dot_product_attention`, which has no option); else in 16 bit."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Element types, as keys of `units.DTYPE_BYTES`."""

    parameters: Literal["fp32", "fp16", "bf16"] = "fp32"
    gradients: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type of the gradient buffer (`--accumulate-allreduce-grads-in-fp32`, `--grad-reduce-in-bf16`)."""
    fp8: Fp8Spec | None = None
