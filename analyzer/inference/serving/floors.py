"""Least seconds of the kernels of serving, from their operations and bytes at the peaks of a GPU.

Tables of measured kernels hold the logarithm of the measured seconds relative to these: they change slowly with the shape, so that
few points suffice.
"""

from __future__ import annotations

from typing import Final

from analyzer.specs.speed import SpeedSpec

START: Final = 2e-6
"""Seconds of a kernel without work in a CUDA graph. It keeps the ratios of small kernels small."""
WEIGHT_BYTES: Final = {"16": 2.0, "8": 1.0, "8b": 1.0, "4": 0.5625, "w4": 0.53125, "w4a8": 0.53125}
"""Bytes of an element of a weight. 8: fp8 with one scale for a tensor or row, 8b: with one for each block of 128 x 128, 4: NVFP4,
w4: 4 bits with activations in 16 bit, w4a8: MXFP4 with activations in MXFP8."""
INPUT_BYTES: Final = {"16": 2.0, "8": 1.0, "8b": 1.0, "4": 0.5625, "w4": 2.0, "w4a8": 1.03125}
PEAKS: Final = {"16": "16", "8": "8", "8b": "8", "4": "4", "w4": "16", "w4a8": "8"}
"""The bits of the factors, whose peak bounds the operations."""
LATENT_READ: Final = 576
"""Elements of a token in the latent cache of the measured kernels: 512 latents and 64 of the rotated key."""
LATENT_WIDTH: Final = 576 + 512
"""Elements that each query head multiplies with a token of the latent cache."""


def base_kind(kind: str) -> str:
    """The kind whose bytes and operations experts have: w4m, MXFP4 of gpt-oss, has those of w4."""
    return "w4" if kind == "w4m" else kind


def gemm_floor(speed: SpeedSpec, kind: str, m: float, n: float, k: float) -> float:
    """A product of m rows with a weight of n columns and depth k."""
    moved = n * k * WEIGHT_BYTES[kind] + m * k * INPUT_BYTES[kind] + 2 * m * n
    return max(2 * m * n * k / speed.peak_flops[PEAKS[kind]], moved / speed.hbm_bytes) + START


def attention_floor(
    speed: SpeedSpec, *, element_bytes: float, width: float, group: float, heads: float, batch: float, length: float
) -> float:
    """Attention of one token of each request. `heads`: of keys and values on the rank; `group`: query heads of each."""
    moved = 2 * batch * heads * width * (length * element_bytes + 2 * group)
    operations = 4 * batch * heads * group * width * length
    return max(moved / speed.hbm_bytes, operations / speed.peak_flops["16"]) + START


def latent_floor(speed: SpeedSpec, *, element_bytes: float, heads: float, batch: float, length: float) -> float:
    """The same with latents: all heads of the rank read one cache."""
    moved = batch * (length * LATENT_READ * element_bytes + 2 * heads * LATENT_WIDTH)
    operations = 2 * batch * heads * LATENT_WIDTH * length
    return max(moved / speed.hbm_bytes, operations / speed.peak_flops["16"]) + START


def experts_floor(
    speed: SpeedSpec, kind: str, *, tokens: float, hidden: float, width: float, local: float, experts: float, topk: float
) -> float:
    """Gated experts of a rank. `width`: of an expert on the rank; `local`: experts of the rank, of `experts` in all."""
    chosen: float = max(1.0, min(local * (1 - (1 - topk / experts) ** tokens), tokens * topk))
    weights = 3 * hidden * width
    pairs = tokens * topk * local / experts
    moved = chosen * weights * WEIGHT_BYTES[kind] + 4 * tokens * hidden
    return max(2 * pairs * weights / speed.peak_flops[PEAKS[kind]], moved / speed.hbm_bytes) + 5 * START


def all_reduce_floor(speed: SpeedSpec, *, ranks: float, size: float) -> float:
    """An all-reduce of `size` bytes over ranks that NVLink connects."""
    return 2 * (ranks - 1) / ranks * size / speed.nvlink_bytes + START
