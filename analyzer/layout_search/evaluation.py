"""The exact memory and time of a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from analyzer.communication.table import communication_rows
from analyzer.errors import AnalyzerError
from analyzer.layout_search.space import Layout
from analyzer.memory.ranks import rank_classes_unlimited
from analyzer.memory.verdict import estimated_range, highest, is_tight
from analyzer.passes.stages import stage_models, without_equal
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.iteration import iteration_time
from analyzer.time.work.model_flops import model_flops


class Evaluation(NamedTuple):
    """A layout with its exact memory and time."""

    layout: Layout
    options: dict[str, object]
    """The options that differ from those of the launch, by flag. False: switched off; None: left out."""
    iteration_seconds: float
    device_bytes: int
    """Device memory of the highest-memory rank, as in the report of the layout."""
    tight: bool
    """The headroom is below the margin, or within the estimated range of the memory."""
    tokens_per_second_per_gpu: float
    model_flops_utilization: float
    parts_seconds: dict[str, float]
    """The parts of the iteration (`analyzer.time.iteration.PARTS`)."""


def seconds_of(job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> tuple[float, dict[str, float]]:
    """Seconds of an iteration, and its parts."""
    stages = stage_models(job)
    time = iteration_time(job, stages, communication_rows(job, without_equal(stages)), speed, rates)
    return time.seconds, time.parts


def evaluate(
    layout: Layout,
    options: dict[str, object],
    job: TrainingJob,
    speed: SpeedSpec,
    rates: Efficiencies,
    *,
    is_needed: Callable[[float], bool] = lambda _: True,
) -> Evaluation | None:
    """The exact memory and time of a layout; None if it does not fit, or only because PyTorch frees unused segments.

    `is_needed` is called with the seconds of an iteration. If it is false the memory is not computed, and the result is None.
    """
    seconds, parts = seconds_of(job, speed, rates)
    return with_memory(layout, options, job, speed, seconds, parts) if is_needed(seconds) else None


def with_memory(
    layout: Layout, options: dict[str, object], job: TrainingJob, speed: SpeedSpec, seconds: float, parts: dict[str, float]
) -> Evaluation | None:
    """The evaluation of a layout whose time is known; None if it does not fit, or only because PyTorch frees unused segments."""
    capacity = job.hardware.capacity_bytes
    if capacity is None:
        raise AnalyzerError("the capacity of the GPU is not known")
    ranks = rank_classes_unlimited(job, enough_bytes=capacity)
    device_bytes = highest(ranks).memory.device_bytes
    if device_bytes > capacity:
        return None
    world = job.parallel.world_size
    return Evaluation(
        layout=layout,
        options=options,
        iteration_seconds=seconds,
        device_bytes=device_bytes,
        tight=is_tight(device_bytes, estimated_range(ranks)[1], job.hardware),
        tokens_per_second_per_gpu=job.batch.global_batch_size * job.batch.seq_length / seconds / world,
        model_flops_utilization=model_flops(job) / seconds / world / speed.peak_flops["16"],
        parts_seconds=parts,
    )
