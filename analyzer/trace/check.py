"""Hold a report against a trace of one of its ranks: `--info-check`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.errors import InputError
from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.trace.compare import Comparison, compare
from analyzer.trace.events import Header
from analyzer.trace.reader import Trace
from analyzer.trace.summary import fold

OPTION: Final = "--info-check"


def check(report: Report, trace: Trace, *, tolerance: float) -> Comparison:
    """Compare the recorded rank. Raises InputError where the trace belongs to another world, or breaks off before a step."""
    header = trace.header
    world = report.job.parallel.world_size
    if header.world_size != world:
        raise InputError(
            OPTION,
            f"the trace is of {header.world_size} ranks and the launch of {world}",
            "give the arguments of the recorded launch",
        )
    recorded = fold(trace)
    if not recorded.iterations:
        raise InputError(OPTION, "the trace breaks off before the first step", "record it again")
    rank = next(each for each in report.ranks if any(first <= header.rank <= last for first, last in each.ranks))
    rows = [row for row in report.communication if row.pipeline_rank == rank.pipeline_rank]
    return compare(rank, recorded, communication=rows, tolerance=tolerance)


def as_recorded(job: TrainingJob, header: Header) -> TrainingJob:
    """The launch with as many layers and microbatches as were recorded: fewer may show the same."""
    layers, count = header.extra.get("layers"), header.extra.get("microbatches")
    if layers:
        job = shortened(job, int(layers))
    if count:
        job = replace(job, batch=replace(job.batch, microbatches=int(count), first_microbatches=int(count)))
    return job


def shortened(job: TrainingJob, layers: int) -> TrainingJob:
    """The launch with fewer decoder layers. Raises InputError where it has not so many."""
    if not 0 < layers <= job.model.num_layers:
        raise InputError("--info-layers", f"the model has {job.model.num_layers} layers, not {layers}", "give fewer")
    moe = job.model.moe
    model = replace(job.model, num_layers=layers, moe=moe and replace(moe, layers=moe.layers[:layers]))
    return replace(job, model=model)
