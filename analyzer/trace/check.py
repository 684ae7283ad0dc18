"""Compare a report with a trace of one of its ranks: `--info-check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from analyzer.errors import InputError
from analyzer.results import RankClass, Report
from analyzer.specs import TrainingJob
from analyzer.trace.compare import Comparison, compare
from analyzer.trace.events import Header
from analyzer.trace.kernels import PredictedKernels
from analyzer.trace.reader import Trace
from analyzer.trace.summary import summarize

OPTION: Final = "--info-check"


def check(
    report: Report, trace: Trace, *, tolerance: float, kernels: Callable[[RankClass], PredictedKernels] | None = None
) -> Comparison:
    """Compare the prediction for the recorded rank with the trace.

    `kernels` returns the GEMMs and attention kernels of a rank class; without it they are not compared.

    Raises InputError if the world sizes differ, or if the trace ends before the first training step.
    """
    header = trace.header
    world = report.job.parallel.world_size
    if header.world_size != world:
        raise InputError(
            OPTION,
            f"the trace has world size {header.world_size} but the launch has {world}",
            "give the arguments of the recorded launch",
        )
    recorded = summarize(trace)
    if not recorded.iterations:
        raise InputError(OPTION, "the trace ends before the first training step", "record it again")
    rank = next(each for each in report.ranks if any(first <= header.rank <= last for first, last in each.ranks))
    rows = [row for row in report.communication if row.pipeline_rank == rank.pipeline_rank]
    return compare(rank, recorded, communication=rows, kernels=kernels(rank) if kernels else None, tolerance=tolerance)


def as_recorded(job: TrainingJob, header: Header) -> TrainingJob:
    """Return the job with the recorded numbers of layers and microbatches, which can be smaller than those of the launch."""
    layers, count = header.extra.get("layers"), header.extra.get("microbatches")
    if layers:
        job = shortened(job, int(layers))
    if count:
        job = replace(job, batch=replace(job.batch, microbatches=int(count), first_microbatches=int(count)))
    return job


def shortened(job: TrainingJob, layers: int) -> TrainingJob:
    """Return the job with only the first `layers` decoder layers. Raises InputError if the model has fewer layers."""
    if not 0 < layers <= job.model.num_layers:
        fault = f"the model has {job.model.num_layers} layers, not {layers}"
        raise InputError("--info-layers", fault, f"give a number from 1 to {job.model.num_layers}")
    moe = job.model.moe
    model = replace(job.model, num_layers=layers, moe=moe and replace(moe, layers=moe.layers[:layers]))
    return replace(job, model=model)
