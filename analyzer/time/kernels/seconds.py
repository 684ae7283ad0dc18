"""Seconds of a kernel on a GPU.

GEMM: the operations at the efficiency of its shape, plus the traffic of its factors and its output. Measured kernels show that
both add up (the last wave of tiles writes while no tile computes), and that the efficiency falls with the depth k, with unfilled
tiles and with unfilled waves of tiles over the multiprocessors.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp, sqrt
from typing import Final

from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.tables import least_residual, residual
from analyzer.time.work.kernels import Attention, Gemm, HostLoop, Kernel, MemoryKind, Precision
from analyzer.units import round_up

TILES: Final = ((256, 256, 1.0), (256, 128, 0.98), (128, 128, 0.92), (128, 64, 0.8), (64, 64, 0.65))
"""Sizes of the tiles that GEMM libraries choose from, with the efficiency of each relative to the largest."""
SMALLEST_TILE: Final = 64
"""Rows of the smallest tile. One that is not filled takes as long as a filled one."""
MEASURED_OUTPUT: Final = 2.0
"""Bytes of an element of the outputs in the tables."""
ATTENTION_TILE: Final = 128
"""Queries of one tile of an attention kernel."""


def kernel_seconds(kernel: Kernel, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of a kernel, or of a loop of the host."""
    if isinstance(kernel, HostLoop):
        return kernel.operations * rates.host_operation + kernel.reads * rates.host_read
    if isinstance(kernel, Gemm):
        return gemm_seconds(kernel, speed, rates)
    if isinstance(kernel, Attention):
        return attention_seconds(kernel, speed, rates)
    return kernel.bytes / (speed.hbm_bytes * _memory_share(kernel.kind, rates)) + kernel.launches * rates.kernel_gap


def _memory_share(kind: MemoryKind, rates: Efficiencies) -> float:
    """Share of the memory bandwidth. Kernels that multiprocessors limit depend on the clock."""
    if kind == "scan":
        return rates.memory_scan * rates.clock
    if kind == "convolution":
        return rates.memory_convolution * rates.clock
    return rates.memory_permute if kind == "permute" else rates.memory


def gemm_seconds(gemm: Gemm, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of a GEMM or a grouped GEMM."""
    if 0 in (gemm.m, gemm.n, gemm.k):
        return 0.0
    peak = speed.peak_flops[gemm.precision] * _ceiling(gemm.precision, rates) * rates.clock
    shape = fill(gemm.m, gemm.n, gemm.batch, speed.multiprocessors)
    if not (gemm.grouped and gemm.depth_is_tokens):  # there the depth is the number of rows
        shape *= gemm.k / (gemm.k + rates.gemm_half_depth)
    if gemm.grouped:
        rows = gemm.rows if gemm.depth_is_tokens else round_up(gemm.rows, SMALLEST_TILE)
        shape *= rows / (rows + rates.gemm_half_rows)
    math = gemm.flops / (peak * shape)
    accumulated = max(0.0, gemm.output_bytes - MEASURED_OUTPUT) * gemm.m * gemm.n * gemm.batch
    traffic = (gemm.bytes - accumulated) / (speed.hbm_bytes * rates.memory)
    product = max(math, traffic) + rates.gemm_traffic * min(math, traffic)
    if rates.gemm_shapes:
        product *= exp(rates.gemm_shapes * residual(speed.name, speed.architecture, gemm.precision, gemm.m, gemm.n, gemm.k))
    # an output that is added to a buffer: its tiles are read and written when no product is computed
    return product + rates.accumulation * accumulated / (speed.hbm_bytes * rates.memory) + rates.kernel_gap


def least_gemm_seconds(gemm: Gemm, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of the operations of a GEMM at the highest efficiency that any shape reaches."""
    peak = speed.peak_flops[gemm.precision] * _ceiling(gemm.precision, rates) * rates.clock
    return gemm.flops / peak * exp(rates.gemm_shapes * least_residual(speed.name, speed.architecture, gemm.precision))


def _ceiling(precision: Precision, rates: Efficiencies) -> float:
    if precision == "16":
        return rates.gemm_16
    if precision == "8":
        return rates.gemm_8
    return rates.gemm_4 * rates.cublas_4 if precision == "4" else rates.gemm_32


def attention_seconds(attention: Attention, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of fused attention."""
    tiles = attention.batch * attention.heads * attention.queries / ATTENTION_TILE
    filled = sqrt(min(1.0, tiles / (rates.attention_waves * speed.multiprocessors)))
    keys = 2 * attention.pairs / attention.queries + ATTENTION_TILE  # of the last query, and of unfilled tiles
    width = (attention.head_dim + attention.value_dim) / 2
    share = rates.attention * rates.clock * filled * width / (width + rates.attention_half_width)
    if attention.name == "backward":
        share *= rates.attention_backward
        if attention.head_dim != attention.value_dim:
            share *= rates.attention_unequal_heads
    # each query has a constant cost, beside that of its keys
    flops = attention.flops * (keys + rates.attention_half_sequence) / (keys - ATTENTION_TILE) if attention.pairs else 0.0
    return flops / (speed.peak_flops["16"] * share) + rates.kernel_gap


@lru_cache(maxsize=65536)
def fill(m: int, n: int, batch: int, multiprocessors: int) -> float:
    """Share of the tiles' elements that belong to the output, times the share of the waves' multiprocessors that have a tile.

    For the best of the tile sizes. Splitting k among multiprocessors softens the last wave: its share enters with a square root.
    """
    best = 0.0
    for tile_m, tile_n, grade in TILES:
        rows, columns = ceil(m / tile_m), ceil(n / tile_n)
        used = m * n / (rows * tile_m * columns * tile_n)
        waves = rows * columns * batch / multiprocessors
        best = max(best, grade * used * sqrt(waves / ceil(waves)))
    return best
