"""Element types of parameters, gradients and GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Fp8Spec:
    """Products of Transformer Engine's linear layers in FP8 or FP4. Attention, norms, embedding, output layer stay in 16 bit."""

    format: Literal["e4m3", "hybrid", "e2m1"]
    """hybrid: gradients of activations in e5m2, no difference in bytes; e2m1: FP4, with the recipe nvfp4."""
    recipe: Fp8Recipe = "delayed"
    stored_parameters: bool = False
    """`--fp8-param-gather`: the weights of those layers are stored and gathered in FP8."""
    layers_at_start_in_16_bit: int = 0
    """With `--first-last-layers-bf16`."""
    layers_at_end_in_16_bit: int = 0
    amax_history_len: int = 1
    """Of each scaling factor, with the delayed recipe."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Element types, as the keys of `units.DTYPE_BYTES`."""

    parameters: Literal["fp32", "fp16", "bf16"] = "fp32"
    gradients: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Of the contiguous gradient buffer (`--accumulate-allreduce-grads-in-fp32`, `--grad-reduce-in-bf16`)."""
    fp8: Fp8Spec | None = None
