"""Rules for the sizes of Mamba layers.

Source: `MambaMixer.__init__` (core/ssm/mamba_mixer.py), `MambaContextParallel.__init__` (mamba_context_parallel.py, 0.16.1), and
`ensure_stride` of mamba-ssm 2.3 for the channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.specs.job import TrainingJob

_ALIGNED: Final = 8
"""Channels of the convolution on a rank are a multiple of this."""
_ALIGNED_IN_FP8: Final = 16


def hybrid_violations(job: TrainingJob) -> Iterator[Violation]:
    """Mamba layers that cannot be split over tensor- and context-parallel ranks."""
    hybrid, parallel = job.model.hybrid, job.parallel
    if hybrid is None or not hybrid.has_mamba:
        return
    t, c = parallel.tensor, parallel.context
    for dest, name, size in (("mamba_num_heads", "heads", hybrid.heads), ("mamba_num_groups", "groups", hybrid.groups)):
        if size % t:
            yield Violation(
                ("tensor_model_parallel_size",),
                f"{size} {name} of the Mamba layers cannot be split over {t} tensor-parallel ranks (--{dest.replace('_', '-')})",
                f"use a divisor of {size}",
            )
            return
    heads, groups = hybrid.heads // t, hybrid.groups // t
    shared = c % groups if groups < c else groups % c
    if heads % c or shared:
        what = f"{heads} heads" if heads % c else f"{groups} groups"
        yield Violation(
            ("context_parallel_size",),
            f"{what} of the Mamba layers on a tensor-parallel rank cannot be split over {c} context-parallel ranks",
            "use a smaller --context-parallel-size or --tensor-model-parallel-size",
        )
        return
    channels = (heads // c) * hybrid.head_dim + 2 * max(groups // c, 1) * hybrid.state_dim
    if channels % _ALIGNED:
        yield Violation(
            ("mamba_state_dim",),
            f"the convolution has {channels} channels on a rank, and its kernel needs a multiple of {_ALIGNED}",
            "change --mamba-head-dim or --mamba-state-dim",
        )
    projected = (2 * hybrid.width + 2 * hybrid.state_width + hybrid.heads) // t
    if job.precision.fp8 is not None and projected % _ALIGNED_IN_FP8:
        yield Violation(
            ("fp8",),
            f"an input projection of Mamba layers has {projected} outputs on a rank, and FP8 needs a multiple of {_ALIGNED_IN_FP8}",
            "change --mamba-num-heads or --tensor-model-parallel-size, or leave it out",
        )
