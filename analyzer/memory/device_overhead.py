"""From bytes in tensors to bytes on the device: segments, the CUDA context and communicators. These are estimates.

Sources: PyTorch c10/cuda/CUDACachingAllocator.cpp (segments of 2 MiB and more); NCCL src/include/{device,comm}.h
(buffers of the protocols Simple, LL128 and LL for each channel).
"""

from __future__ import annotations

from typing import Final

from analyzer.memory.features import userbuffer_bytes_of
from analyzer.modules.moe.dispatchers import flex_buffer_bytes
from analyzer.modules.shapes import shapes_of
from analyzer.specs import TrainingJob
from analyzer.units import KIB, MIB, round_up

SEGMENT: Final = 2 * MIB
CONTEXT: Final = 512 * MIB
"""CUDA context with the kernels of PyTorch, cuBLAS, cuDNN and Transformer Engine loaded; between 0.4 and 0.8 GiB."""
CHANNELS: Final = 16
CHANNEL_BYTES: Final = 4 * MIB + 120 * 640 * 8 * 8 + 512 * KIB
"""One connection of a channel: Simple 4 MiB (NCCL_BUFFSIZE), LL128 120 × 640 threads × 8 B × 8 steps, LL 512 KiB."""


FRAGMENTATION: Final = 0.08
"""Reserved over allocated, at most: 0.7 to 7.5 % on the 56 ranks that were measured (docs/accuracy.md)."""
CONTEXTS: Final = (400 * MIB, 800 * MIB)
"""The least and the most that a CUDA context takes on the GPUs of today."""
CHANNELS_RANGE: Final = (2, 32)
"""Channels of a communicator: NCCL's least over a network, and the most that it opens over NVLink."""


def reserved_bytes(peak: int, largest_transient: int) -> int:
    """Bytes in the allocator's segments: the peak, and no hole found for the largest temporary tensor."""
    return round_up(peak + largest_transient, SEGMENT)


def communicators(job: TrainingJob) -> int:
    """NCCL communicators that a rank opens: one for each kind of group with more than one member."""
    parallel = job.parallel
    sizes = (parallel.tensor, parallel.pipeline, parallel.data_with_context, parallel.context)
    copies = job.model.tied_embeddings or job.model.mtp_num_layers > 0
    return sum(size > 1 for size in sizes) + (copies and parallel.pipeline > 1)


def outside_allocator_bytes(job: TrainingJob) -> int:
    """Context, communicators and the buffers of libraries, which torch's statistics do not show and `nvidia-smi` does."""
    return CONTEXT + communicators(job) * CHANNELS * CHANNEL_BYTES + _library_buffers(job)


def _library_buffers(job: TrainingJob) -> int:
    """Buffers of the flex dispatcher and of Transformer Engine's userbuffers."""
    flex = flex_buffer_bytes(shapes_of(job)) if job.model.moe is not None and job.model.moe.flex is not None else 0
    return flex + userbuffer_bytes_of(job)


def device_range(job: TrainingJob, *, peak: int, reserved: int) -> tuple[int, int]:
    """The least and the most that the device may show, for an allocated peak and an estimate of the reserved bytes.

    The least is what is sure: every byte that is allocated at the peak, and the smallest context and communicators. The
    most has segments with `FRAGMENTATION` on top of the peak, and the largest of both.
    """
    fragmented = max(reserved, round_up(int(peak * (1 + FRAGMENTATION)), SEGMENT))
    least, most = (
        context + communicators(job) * channels * CHANNEL_BYTES for context, channels in zip(CONTEXTS, CHANNELS_RANGE, strict=True)
    )
    buffers = _library_buffers(job)
    return peak + least + buffers, fragmented + most + buffers
