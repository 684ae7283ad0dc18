"""Estimates the device memory that a rank uses in addition to its tensors: segments, the CUDA context and NCCL communicators.

Source: PyTorch c10/cuda/CUDACachingAllocator.cpp (segments of at least 2 MiB).
"""

from __future__ import annotations

from typing import Final

from analyzer.memory.communicators import communicator_bytes, communicators
from analyzer.memory.features import has_rare_features, userbuffer_bytes_of
from analyzer.modules.moe.dispatchers import flex_buffer_bytes
from analyzer.modules.shapes import shapes_of
from analyzer.specs import TrainingJob
from analyzer.specs.software import DEFAULT_NCCL
from analyzer.units import GIB, MIB, round_up

SEGMENT: Final = 2 * MIB
CONTEXT: Final = 512 * MIB
"""Bytes of a CUDA context with the kernels of PyTorch, cuBLAS, cuDNN and Transformer Engine; measured: 0.4 to 0.8 GiB."""
FRAGMENTATION: Final = 0.08
"""Upper bound of reserved over allocated memory, minus 1, without a replay. On 56 measured ranks it was 0.7 to 7.5 %."""
RARE_FRAGMENTATION: Final = 0.4
"""The same with rare features. Megatron-LM's code on the shadow engine reserved 0.4 to 36 % more (docs/accuracy.md)."""
REPLAYED: Final = (0.01, 0.0125)
"""How much less and how much more than the replay a rank may reserve: 55 of 56 measured ranks are within (docs/accuracy.md)."""
SIMULATED: Final = (0.05, 0.1)
"""The same with rare features, of which no run with measured reserved memory is known. On the shadow engine 51 of 52 ranks are
within; on the 27 that were held out, the replay was 6.6 % too low to 3.6 % too high, and once 13.4 % too low (docs/accuracy.md)."""
CONTEXTS: Final = (400 * MIB, 800 * MIB)
"""Minimum and maximum bytes of a CUDA context on current GPUs."""


def reserved_bytes(peak: int, largest_transient: int) -> int:
    """Estimated bytes in the allocator's segments: the peak, and a new segment for the largest temporary tensor."""
    return round_up(peak + largest_transient, SEGMENT)


def outside_allocator_bytes(job: TrainingJob, *, training: bool = True) -> int:
    """Bytes of the CUDA context, the communicators and the buffers of libraries. `training`: as in `communicator_bytes`.

    The statistics of PyTorch's allocator do not include them; `nvidia-smi` does.
    """
    return CONTEXT + communicator_bytes(job, training=training).bytes + _library_buffers(job)


def outside_allocator_range(job: TrainingJob) -> tuple[int, int]:
    """The same with the smallest and the largest context and communicators, in training."""
    buffers, libraries = communicator_bytes(job), _library_buffers(job)
    return CONTEXTS[0] + buffers.least + libraries, CONTEXTS[1] + buffers.most + libraries


def outside_allocator_note(job: TrainingJob, *, training: bool = True) -> str:
    """What `outside_allocator_bytes` assumes for every launch, in words."""
    found = communicators(job, training=training)
    least, size, most = (value / GIB for value in communicator_bytes(job, training=training))
    number = f"{len(found)} communicators" if len(found) > 1 else "one communicator"
    if not found:
        return "beside reserved memory the device has 0.5 GiB of the CUDA context"
    ends = "" if f"{least:.1f}" == f"{most:.1f}" else f", {least:.1f} to {most:.1f} GiB"
    settings = "the default settings of NCCL" if job.nccl == DEFAULT_NCCL else "the settings of NCCL in the environment"
    return (
        f"beside reserved memory the device has 0.5 GiB of the CUDA context and {size:.1f} GiB of NCCL's buffers ({number}{ends}), "
        f"with {settings}"
    )


def _library_buffers(job: TrainingJob) -> int:
    """Bytes of the buffers of the flex dispatcher and of Transformer Engine's userbuffers."""
    flex = flex_buffer_bytes(shapes_of(job)) if job.model.moe is not None and job.model.moe.flex is not None else 0
    return flex + userbuffer_bytes_of(job)


def reserved_range(*, peak: int, reserved: int, replayed: bool, rare: bool = False) -> tuple[int, int]:
    """Minimum and maximum of the reserved bytes, for the allocated peak and the estimated reserved bytes.

    With a replay they are within `REPLAYED` of the estimate, or `SIMULATED` with `rare` features, and not below the peak. Without
    one the minimum is the peak, and the maximum `FRAGMENTATION` or `RARE_FRAGMENTATION` above it.
    """
    if replayed:
        below, above = SIMULATED if rare else REPLAYED
        return max(peak, int(reserved * (1 - below))), round_up(int(reserved * (1 + above)), SEGMENT)
    most = RARE_FRAGMENTATION if rare else FRAGMENTATION
    return peak, max(reserved, round_up(int(peak * (1 + most)), SEGMENT))


def device_range(
    job: TrainingJob, *, peak: int, reserved: int, replayed: bool, recorded: bool = False, garbage: int = 0
) -> tuple[int, int]:
    """Minimum and maximum bytes on the device: `reserved_range`, with the smallest and the largest context and communicators.

    `recorded`: the replay is that of a recorded step, in which the order of requests is known with every feature. `garbage`:
    `RankMemory.garbage_bytes`.
    """
    rare = has_rare_features(job) and not recorded
    lowest, highest = reserved_range(peak=peak, reserved=reserved, replayed=replayed, rare=rare)
    least, most = outside_allocator_range(job)
    return lowest - garbage + least, highest + most
