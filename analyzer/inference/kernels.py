"""Seconds of the kernels of inference: GEMMs with few rows, quantized weights, and attention over a cache.

GEMMs of prefill have many rows, and take the time that they take in training. GEMMs of decode have one row for each request: they
read their weights, and the bandwidth of the memory bounds them. Weights with fewer bits than the activations are dequantized: by
the GEMM itself if it has few rows, otherwise by a kernel before it that writes them in the type of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

from analyzer.inference.serving.floors import START, WEIGHT_BYTES, attention_floor, gemm_floor, latent_floor
from analyzer.inference.serving.tables import ratio
from analyzer.inference.weights import bytes_per_element
from analyzer.specs import InferenceJob, QuantizationSpec
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import gemm_seconds
from analyzer.time.work.kernels import BYTES, Gemm, Precision

FEW_ROWS: Final = 64
"""Rows of the smallest tile of GEMM kernels (`time.kernels.seconds.TILES`)."""
CONVERSIONS: Final = 2
"""Operations of the vector units to dequantize an element: a product and a sum."""
VECTOR_SHARE: Final = 1 / 16
"""Speed of the vector units in fp32 relative to the matrix units in 16 bit: 19.5 of 312 (A100), 67 of 989 TFLOP/s (H100)."""
TABLES: Final = "trtllm"
"""The engine whose measured kernels are taken for few rows. Its products are those of cuBLAS, as Megatron's are."""
PRECISIONS: Final[dict[int, Precision]] = {4: "4", 8: "8", 16: "16", 32: "32"}


@dataclass(frozen=True)
class Machine:
    """A GPU with its efficiencies."""

    speed: SpeedSpec
    rates: Efficiencies
    tables: bool = False
    """Kernels with few rows are measured ones, those of `serving.tables`."""

    @property
    def memory(self) -> float:
        """Bytes per second that kernels reach."""
        return self.speed.hbm_bytes * self.rates.memory

    @cached_property
    def fastest(self) -> SpeedSpec:
        """The GPU with the rate of integers where it has no floating-point numbers of as few bits."""
        peaks = {bits: max(peak, self.speed.integer_ops.get(bits, 0.0)) for bits, peak in self.speed.peak_flops.items()}
        return replace(self.speed, peak_flops=peaks)

    def peak(self, precision: Precision) -> float:
        """Operations per second that large GEMMs reach."""
        shares = {"32": self.rates.gemm_32, "16": self.rates.gemm_16, "8": self.rates.gemm_8, "4": self.rates.gemm_4}
        return self.fastest.peak_flops[precision] * shares[precision]


def linear_seconds(gemm: Gemm, machine: Machine, quantization: QuantizationSpec | None) -> float:
    """Seconds of a linear layer. `quantization`: that of its weights and inputs; None if they are not quantized."""
    if 0 in (gemm.m, gemm.n, gemm.k):
        return 0.0
    weights = gemm.batch * gemm.n * gemm.k
    if quantization is None or quantization.weight_bits == quantization.activation_bits == 16:
        return _gemm(gemm, machine, weight_bytes=BYTES[gemm.precision] * weights)
    bits = max(quantization.weight_bits, quantization.activation_bits)
    gemm = gemm._replace(precision=PRECISIONS[bits])
    stored = float(BYTES[gemm.precision])
    if quantization.weight_bits < 16:
        stored = bytes_per_element(quantization, depth=gemm.k)
    casts = 0.0
    if quantization.activation_bits < 16:  # inputs are read in 16 bit and written quantized
        casts = gemm.batch * gemm.m * gemm.k * (2 + quantization.activation_bits / 8) / machine.memory + machine.rates.kernel_gap
    if quantization.weight_bits >= quantization.activation_bits:
        return casts + _gemm(gemm, machine, weight_bytes=stored * weights)
    if gemm.m <= FEW_ROWS:
        return casts + _gemm(gemm, machine, weight_bytes=stored * weights, dequantized=weights)
    expanded = weights * (stored + BYTES[gemm.precision]) / machine.memory + machine.rates.kernel_gap
    return casts + expanded + _gemm(gemm, machine, weight_bytes=BYTES[gemm.precision] * weights)


def _gemm(gemm: Gemm, machine: Machine, *, weight_bytes: float, dequantized: int = 0) -> float:
    rates = machine.rates
    if gemm.m > FEW_ROWS:
        return gemm_seconds(gemm, machine.fastest, rates)
    if machine.tables and not dequantized and not gemm.grouped:
        measured = _measured_gemm(gemm, machine.speed)
        if measured is not None:
            return measured
    rows = min(FEW_ROWS, ceil(gemm.m / 8) * 8)
    math = 2 * rows * gemm.n * gemm.k * gemm.batch / machine.peak(gemm.precision)
    math += CONVERSIONS * dequantized / (VECTOR_SHARE * machine.peak("16"))
    inputs = gemm.batch * (BYTES[gemm.precision] * gemm.m * gemm.k + gemm.output_bytes * gemm.m * gemm.n)
    return max((weight_bytes + inputs) / machine.memory, math) + rates.kernel_gap


def _measured_gemm(gemm: Gemm, speed: SpeedSpec) -> float | None:
    """Seconds of a product with few rows in the tables; None if there are none."""
    found = ratio(speed, TABLES, f"gemm {gemm.precision}", "gemm", gemm.m, gemm.n, gemm.k)
    if found is None:
        return None
    return gemm.batch * found * gemm_floor(speed, gemm.precision, gemm.m, gemm.n, gemm.k)


def experts_seconds(
    gemm: Gemm, machine: Machine, quantization: QuantizationSpec | None, *, tokens: float, width: float, local: float
) -> float | None:
    """Seconds of one of the two grouped products of experts with few rows; None if no table has them.

    `tokens` of the step reach the experts, of which `local` with `width` columns are on the rank. The products read the weights of
    the chosen experts once. The tables have both products together.
    """
    weights, inputs = (16, 16) if quantization is None else (quantization.weight_bits, quantization.activation_bits)
    if not machine.tables or gemm.m > FEW_ROWS or weights != inputs or gemm.precision == "32":
        return None
    found = ratio(machine.speed, TABLES, f"experts {weights}", "experts", tokens, width, local)
    if found is None:
        return None
    moved = gemm.batch * gemm.n * gemm.k * WEIGHT_BYTES[str(weights)] + gemm.batch * gemm.m * (2 * gemm.k + 2 * gemm.n)
    least = max(gemm.flops / machine.speed.peak_flops[PRECISIONS[weights]], moved / machine.speed.hbm_bytes)
    return found * (least + 2.5 * START)


def measured_attention(job: InferenceJob, machine: Machine, *, heads: int, length: int, latent: bool) -> float | None:
    """Seconds of the attention of a layer in a decode step in the tables; None if there are none."""
    model, spec, speed = job.model, job.inference, machine.speed
    bits = spec.quantization.cache_bits
    if not machine.tables or bits < 8:
        return None
    if latent:
        found = ratio(speed, TABLES, f"latent {bits}", "latent", heads, spec.batch_size, length)
        floor = latent_floor(speed, element_bytes=bits / 8, heads=heads, batch=spec.batch_size, length=length)
    else:
        keys = max(1, model.num_query_groups // job.parallel.tensor)
        point = (heads / keys, keys, spec.batch_size, length)
        found = ratio(speed, TABLES, f"attention {model.kv_channels} {bits}", "attention", *point)
        floor = attention_floor(
            speed, element_bytes=bits / 8, width=model.kv_channels, group=heads / keys, heads=keys, batch=spec.batch_size,
            length=length,
        )  # fmt: skip
    return None if found is None else found * floor


def cached_attention_seconds(
    machine: Machine, *, cache_bytes: float, operations: float, elements: float, cache_bits: int, dtype: str
) -> float:
    """Seconds of the attention of one layer in a decode step, which reads the cache.

    `operations`: of the products of queries and keys, and of probabilities and values. `elements`: of the cache that are read, each
    dequantized once if the cache has fewer than 16 bits.
    """
    math = operations / machine.peak("32" if dtype == "fp32" else "16")
    if cache_bits < 16:
        math += CONVERSIONS * elements / (VECTOR_SHARE * machine.peak("16"))
    return max(cache_bytes / machine.memory, math) + machine.rates.kernel_gap
