"""Whether smaller gradient buckets hide more of the data-parallel communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from analyzer.communication.table import communication_rows
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.states.buffers.parameter_order import numel_of
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.iteration import IterationTime, iteration_time

COUNTS: Final = (2, 4, 8, 16, 32)
"""Numbers of buckets that are tried."""
LEAST: Final = 0.03
"""Share of an iteration that a change must save."""
NEAR: Final = 0.15
"""Fewer buckets are advised if they lose at most this share of what the best number saves.

Every bucket has the latency of a ring of all its ranks, which the time model counts too low for thousands of ranks.
"""


def bucket_advice(
    job: TrainingJob, stages: Sequence[StageModel], time: IterationTime, speed: SpeedSpec, rates: Efficiencies
) -> str:
    """A sentence with the option for smaller buckets, if they make an iteration faster; otherwise empty.

    A bucket has max(40M, 1M · data-parallel size) elements, so that rings of thousands of ranks stay limited by bandwidth
    (`DistributedDataParallel` and `get_model`, 0.16.1). With that many ranks a pipeline stage may fit into one bucket, which is
    complete only when no pass is left to hide it. Stages after the first and chunks after the first always have one bucket.
    """
    if not job.optimizer.overlap_grad_reduce or job.fsdp is not None or not job.core.buckets_by_ranks:
        return ""
    saved = {count: time.seconds - _with_buckets(job, count, stages, speed, rates) for count in COUNTS}
    most = max(saved.values())
    if most < LEAST * time.seconds:
        return ""
    count = min(count for count in COUNTS if saved[count] >= (1 - NEAR) * most)
    option = f"--ddp-num-buckets {count}"
    if not job.core.has_number_of_buckets:
        option = f"--ddp-bucket-size {max(1, _elements(stages) // count)}"
    elif job.optimizer.ddp_bucket_size is not None:
        option += " in place of --ddp-bucket-size"
    saving = f"{option} makes an iteration {saved[count] / time.seconds:.0%} shorter"
    return f"Smaller gradient buckets hide more of the data-parallel communication: {saving}."


def _elements(stages: Sequence[StageModel]) -> int:
    """Elements of the parameters of the first pipeline rank, which Megatron divides by the number of buckets."""
    return sum(numel_of(tree) for tree in stages[0].trees)


def _with_buckets(job: TrainingJob, count: int, stages: Sequence[StageModel], speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of an iteration with a number of buckets."""
    changed = replace(job, optimizer=replace(job.optimizer, ddp_bucket_size=None, ddp_num_buckets=count))
    return iteration_time(changed, stages, communication_rows(changed, stages), speed, rates).seconds
