"""The iterations that a recorded step needs. This module does not need torch."""

from __future__ import annotations

from typing import Final

from analyzer.specs import TrainingJob

EAGER: Final = 2
"""The second iteration without graphs is like all later ones."""


def captured_before(job: TrainingJob) -> int | None:
    """The iteration before which Transformer Engine captures CUDA graphs; None without such graphs.

    A run has `warmup_steps` iterations before the capture. More than `EAGER` are left out.
    """
    if job.graphs is None or job.graphs.implementation != "transformer_engine":
        return None
    return min(job.graphs.warmup_steps, EAGER)


def full_iteration(job: TrainingJob) -> bool:
    """Whether one graph captures the forward and backward passes of an iteration."""
    return job.graphs is not None and "full_iteration" in job.graphs.scope


def default_iterations(job: TrainingJob) -> int:
    """The number of iterations. With CUDA graphs the last one replays all graphs, and captures none.

    The first one with Megatron's own graphs allocates workspaces of another stream.
    """
    if job.graphs is None:
        return 2
    if job.graphs.implementation == "local" and not full_iteration(job):
        return 3
    return min(job.graphs.warmup_steps, EAGER) + 2


def needs_every_microbatch(job: TrainingJob) -> bool:
    """Whether memory grows with the number of microbatches: each one has buffers, graphs or logits of a teacher of its own."""
    graphs = job.graphs is not None and job.graphs.implementation == "local" and job.parallel.pipeline > 1
    return full_iteration(job) or graphs or job.model.distillation is not None
