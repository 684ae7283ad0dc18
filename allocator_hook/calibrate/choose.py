"""Which kernels are measured: a standard set, and those of a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from allocator_hook.calibrate.items import HostCalls, Item
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.pass_work import chunk_work
from analyzer.time.work.kernels import Attention, Gemm, GpuKernel, HostLoop, Kernel, MemoryBound, Precision

MIB: Final = 2**20
TINY: Final = MemoryBound("residual add", 6 * 1024)
"""A kernel that takes hardly longer than the gap between two kernels."""
LINEAR: Final = HostCalls("Linear", 3)
"""Forward and backward of a linear layer, for which the time model counts 3 and 4 operations of the host."""
_DEPTHS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384)
_SQUARES: Final = (2048, 4096, 8192)
_SHAPES: Final = ((4096, 28672, 8192), (8192, 6144, 4096), (16384, 2048, 4096), (2048, 16384, 2048), (1024, 4096, 4096))
_EXPERT_ROWS: Final = (64, 256, 1024, 4096)
_SEQUENCES: Final = ((4, 1024), (2, 2048), (1, 4096), (1, 8192), (1, 16384))
"""Samples and tokens of attention with 16 heads."""
_MEMORY: Final = (16, 64, 256, 1024)
"""MiB that memory-bound kernels move."""


def standard_set() -> list[Item]:
    """Kernels of the sizes that occur in trainings, those first that determine most efficiencies."""
    return [TINY, *_memory_bound(), *_gemms("16"), *_attention(), *_gemms("8"), *_grouped("16"), LINEAR, *_grouped("8"), _single()]


def _gemms(precision: Precision) -> list[Item]:
    """Dense GEMMs: of different depths, square ones, and those of layers in all three directions."""
    found: list[Item] = [Gemm("forward", 8192, 8192, depth, precision) for depth in _DEPTHS]
    found += [Gemm("forward", size, size, size, precision) for size in _SQUARES if size != 8192]
    for m, n, k in _SHAPES:
        found.append(Gemm("forward", m, n, k, precision))
        found.append(Gemm("data gradient", m, k, n, precision))
        added = 8 if precision == "16" else 4
        found.append(Gemm("weight gradient", n, k, m, precision, output_bytes=added, depth_is_tokens=True))
    return found


def _grouped(precision: Precision) -> list[Item]:
    return [Gemm("forward", rows, 4096, 2048, precision, batch=8, grouped=True) for rows in _EXPERT_ROWS]


def _single() -> Item:
    return Gemm("forward", 4096, 4096, 4096, "32")


def _attention() -> list[Item]:
    found: list[Item] = []
    for (batch, tokens), sizes in [(each, (128, 128)) for each in _SEQUENCES] + [((1, 4096), (192, 128)), ((1, 8192), (192, 128))]:
        forward = Attention("forward", batch, 16, tokens, tokens, tokens * tokens / 2, *sizes)
        found += [forward, forward._replace(name="backward")]
    return found


def _memory_bound() -> list[Item]:
    found: list[Item] = []
    for size in _MEMORY:
        moved = float(size * MIB)
        found += [MemoryBound("residual add", moved), MemoryBound("norm", moved)]
        if size >= 64:
            found += [MemoryBound("permutation", moved, "permute"), MemoryBound("reverse permutation", moved, "permute")]
    return found


def kernels_of_launch(job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> list[Item]:
    """The kernels of one microbatch on all stages, as they can be measured, each once: those with the longest total time first."""
    seconds: Counter[GpuKernel] = Counter()
    for stage in stage_models(job):
        for tree in stage.trees:
            work = chunk_work(job, tree)
            for kernel, count in (*work.forward.kernels, *work.backward.kernels):
                if (found := measurable(kernel)) is not None:
                    seconds[found] += count * kernel_seconds(kernel, speed, rates)  # type: ignore[assignment]
    return [kernel for kernel, _ in seconds.most_common()]


def measurable(kernel: Kernel) -> GpuKernel | None:
    """The kernel that is measured in place of a kernel of a launch; None for one without work, scans and convolutions.

    Attention is measured with as many keys as queries and the full causal mask, also for windows and context parallelism. Weight
    gradients of quantized layers are measured without the addition to the buffer, and sizes of quantized GEMMs are rounded up to
    multiples of 16. Bytes of memory-bound kernels are rounded to powers of two, because their time depends on little else.
    """
    if isinstance(kernel, HostLoop):
        return None
    if isinstance(kernel, Gemm):
        if 0 in (kernel.m, kernel.n, kernel.k):
            return None
        return _quantized(kernel) if kernel.precision in ("8", "4") else kernel
    if isinstance(kernel, Attention):
        tokens = kernel.queries
        return kernel._replace(keys=tokens, pairs=tokens * tokens / 2)
    if kernel.bytes < MIB or kernel.kind in ("scan", "convolution"):
        return None
    name = kernel.name.removesuffix(" gradient")
    kept = name if name in ("norm", "permutation", "reverse permutation", "quantization") else "residual add"
    kept = "permutation" if kernel.kind == "permute" and kept == "residual add" else kept
    return MemoryBound(kept, float(2 ** (round(kernel.bytes).bit_length() - 1)), kernel.kind)


def _quantized(gemm: Gemm) -> Gemm:
    m, n, k = (-(-size // 16) * 16 for size in (gemm.m, gemm.n, gemm.k))
    return gemm._replace(m=m, n=n, k=k, output_bytes=4 if gemm.depth_is_tokens else gemm.output_bytes)


def with_separate_additions(items: Iterable[Item]) -> list[Item]:
    """The same, but with a second kernel that adds a 16-bit weight gradient to the fp32 buffer."""
    found: list[Item] = []
    for item in items:
        added = isinstance(item, Gemm) and item.depth_is_tokens and item.precision == "16" and item.output_bytes == 8
        found.append(item._replace(output_bytes=12) if isinstance(item, Gemm) and added else item)
    return list(dict.fromkeys(found))
