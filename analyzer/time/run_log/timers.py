"""Predictions of what Megatron's timers measure.

Source: megatron/core/pipeline_parallel/schedules.py, distributed/finalize_model_grads.py and megatron/training/training.py. The
timer `forward-backward` contains the reduction of gradients, `optimizer` the gather of parameters that is not overlapped, and
`forward-compute` and `backward-compute` the passes of all microbatches without messages between stages. Every timer synchronizes
the GPU, so that a run with timers of level 2 is slower than one without.
"""

from __future__ import annotations

from typing import NamedTuple

from analyzer.specs import TrainingJob
from analyzer.time.iteration import IterationTime


class Predicted(NamedTuple):
    """Predicted seconds of a timer for an iteration."""

    least: float
    """On the pipeline rank on which it is shortest."""
    most: float


def predicted_timers(job: TrainingJob, time: IterationTime) -> dict[str, Predicted]:
    """The timers that can be predicted, by name. Empty for the simple model, which has no passes."""
    if not time.traffic:
        return {}
    gathered = time.exposed_gather
    reduced = [shown - gather for shown, gather in zip(time.exposed_dp, gathered, strict=True)]
    inside = gathered if job.optimizer.overlap_param_gather else [0.0] * len(gathered)
    passes = [rank.end + mine + other for rank, mine, other in zip(time.ranks, reduced, inside, strict=True)]
    after = [0.0] * len(gathered) if job.optimizer.overlap_param_gather else gathered
    step = time.parts["optimizer"] + max(each.scalars for each in time.traffic)
    found = {
        "forward-backward": Predicted(max(passes), max(passes)),  # all ranks wait for each other before it is read
        "optimizer": Predicted(step + min(after), step + max(after)),
    }
    if job.flags.overlap_moe_expert_parallel_comm:
        return found
    for direction, name in enumerate(("forward-compute", "backward-compute")):
        seconds = [
            rank.passes * sum(chunk[direction] for chunk in chunks)
            for rank, chunks in zip(time.ranks, time.pass_totals, strict=True)
        ]
        found[name] = Predicted(min(seconds), max(seconds))
    if job.fsdp is None:
        found["all-grads-sync"] = Predicted(min(reduced), max(reduced))
        if any(after):
            found["params-all-gather"] = Predicted(min(after), max(after))
    return found
