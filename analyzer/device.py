"""From bytes in tensors to bytes on the device: segments, the CUDA context and communicators. These are estimates.

Sources: PyTorch c10/cuda/CUDACachingAllocator.cpp (segments of 2 MiB and more); NCCL src/include/{device,comm}.h
(buffers of the protocols Simple, LL128 and LL for each channel).
"""

from __future__ import annotations

from typing import Final

from analyzer.specs import Launch
from analyzer.units import KIB, MIB, round_up

SEGMENT: Final = 2 * MIB
CONTEXT: Final = 512 * MIB
"""CUDA context with the kernels of PyTorch, cuBLAS, cuDNN and Transformer Engine loaded; between 0.4 and 0.8 GiB."""
CHANNELS: Final = 16
CHANNEL_BYTES: Final = 4 * MIB + 120 * 640 * 8 * 8 + 512 * KIB
"""One connection of a channel: Simple 4 MiB (NCCL_BUFFSIZE), LL128 120 × 640 threads × 8 B × 8 steps, LL 512 KiB."""


def reserved_bytes(peak: int, largest_transient: int) -> int:
    """Bytes in the allocator's segments: the peak, and no hole found for the largest temporary tensor."""
    return round_up(peak + largest_transient, SEGMENT)


def communicators(launch: Launch) -> int:
    """NCCL communicators that a rank opens: one for each kind of group with more than one member."""
    parallel = launch.parallel
    sizes = (parallel.tensor, parallel.pipeline, parallel.data_with_context, parallel.context)
    copies = launch.model.tied_embeddings or launch.model.mtp_num_layers > 0
    return sum(size > 1 for size in sizes) + (copies and parallel.pipeline > 1)


def outside_allocator_bytes(launch: Launch) -> int:
    """Context and communicators, which torch's statistics do not show and `nvidia-smi` does."""
    return CONTEXT + communicators(launch) * CHANNELS * CHANNEL_BYTES
