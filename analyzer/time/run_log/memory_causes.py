"""Likely causes of another memory in a log than predicted."""

from __future__ import annotations

from typing import Final

from analyzer.results import Report
from analyzer.time.run_log.record import RunLog
from analyzer.units import format_bytes

NOTABLE: Final = 0.05
"""Relative difference of the memory of a rank that is explained."""
FULL: Final = 0.97
"""Share of the memory of a GPU from which on reserved memory is named."""


def memory_causes(log: RunLog, report: Report) -> list[str]:
    """Sentences about the rank with the highest peak in the log."""
    if not log.memory:
        return []
    rank, memory = max(log.memory.items(), key=lambda each: (each[1].peak_allocated, -each[0]))
    known = next((each.memory for each in report.ranks if any(first <= rank <= last for first, last in each.ranks)), None)
    if known is None:
        return []
    texts = []
    peak = known.peak_allocated_first_iteration_bytes if memory.iteration == 1 else known.peak_allocated_bytes
    states, peaks = memory.allocated / known.allocated_bytes - 1, memory.peak_allocated / peak - 1
    if memory.iteration > 1 and abs(states) > NOTABLE:
        texts.append(
            f"Allocated memory between iterations differs by {states:+.0%} on rank {rank}: dtypes of gradients or optimizer "
            "states, the sharding of the optimizer, or tensors that the training script keeps."
        )
    elif abs(peaks) > NOTABLE:
        texts.append(
            f"Between iterations rank {rank} agrees, and its peak differs by {peaks:+.0%}: activations, so recomputation, "
            "the attention backend or fused kernels, or the release of Transformer Engine."
            if memory.iteration > 1
            else f"The peak of the first iteration of rank {rank} differs by {peaks:+.0%}."
        )
    held, predicted = memory.peak_reserved - memory.peak_allocated, known.peak_reserved_bytes - known.peak_allocated_bytes
    if memory.iteration > 1 and held - predicted > NOTABLE * memory.peak_reserved:
        texts.append(
            f"{format_bytes(held)} are reserved beyond the peak of allocated memory on rank {rank}, and "
            f"{format_bytes(max(0, predicted))} are predicted: fragmentation, which "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would reduce."
        )
    capacity = report.job.hardware.capacity_bytes
    if log.retries or (capacity is not None and memory.peak_reserved > FULL * capacity):
        what = f"PyTorch freed cached memory {log.retries:,} times" if log.retries else "Reserved memory reaches that of the GPU"
        texts.append(f"{what}: allocations that fail at first and are tried again make iterations longer.")
    return texts
