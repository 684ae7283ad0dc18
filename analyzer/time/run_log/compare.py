"""`--info-log`: what a log says, beside the prediction for the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.results import RankClass, Report
from analyzer.time.estimate import TimeInputs, iteration_of
from analyzer.time.run_log.causes import Cause, causes
from analyzer.time.run_log.record import Measured, RunLog, measured
from analyzer.time.run_log.timers import predicted_timers


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure beside the predicted one."""

    field: str
    """What it is: a field of the JSON report, or `timers.` and the name of a timer."""
    measured: float
    predicted: float | None
    """None if it is not predicted."""
    where: str | None = None
    """The ranks that it is of; None for all."""

    @property
    def percent(self) -> float | None:
        """By how many per cent the measured figure is above the predicted one; None if there is none."""
        return 100 * (self.measured / self.predicted - 1) if self.predicted else None


@dataclass(frozen=True, kw_only=True)
class LogComparison:
    """A log beside the prediction for its launch."""

    log: RunLog
    measured: Measured
    figures: Sequence[Figure]
    causes: Sequence[Cause]
    """Likely causes of the differences, the most likely first."""


def compare_log(log: RunLog, report: Report, inputs: TimeInputs | None) -> LogComparison:
    """A log beside a report. `inputs` are those of its time; None if the speeds of the GPU are not known."""
    found = measured(log)
    figures = [*_time(found, report), *_timers(found, report, inputs), *_parameters(log, report), *_memory(log, report)]
    return LogComparison(log=log, measured=found, figures=figures, causes=causes(log, found, report, inputs))


def _time(found: Measured, report: Report) -> list[Figure]:
    """The figures of an iteration."""
    time, job = report.time, report.job
    batch = found.batch or job.batch.global_batch_size
    tokens = batch * job.batch.seq_length / found.seconds / job.parallel.world_size
    figures = [
        Figure(field="iteration_seconds", measured=found.seconds, predicted=time.iteration_seconds if time else None),
        Figure(field="tokens_per_second_per_gpu", measured=tokens, predicted=time.tokens_per_second_per_gpu if time else None),
    ]
    if found.tflops is not None:
        predicted = time.model_tflops_per_gpu if time else None
        figures.append(Figure(field="model_tflops_per_gpu", measured=found.tflops, predicted=predicted))
    return figures


def _timers(found: Measured, report: Report, inputs: TimeInputs | None) -> list[Figure]:
    """The timers, on the rank on which each is longest."""
    predicted = {} if inputs is None else predicted_timers(report.job, iteration_of(report, inputs))
    figures = []
    for name, (_, most) in found.timers.items():
        known = predicted.get("all-grads-sync" if name.startswith("grads-") else name)
        figures.append(Figure(field=f"timers.{name}", measured=most, predicted=known.most if known else None))
    return figures


def _parameters(log: RunLog, report: Report) -> list[Figure]:
    """The parameters of the model and of one rank of each pipeline stage."""
    figures = []
    if log.total_parameters is not None:
        figures.append(Figure(field="parameters", measured=log.total_parameters, predicted=report.parameters))
    stages = {rank.pipeline_rank: rank for rank in reversed(report.ranks)}
    shown: set[int] = set()
    for (tensor, stage), count in sorted(log.parameters.items()):
        if stage not in shown:
            shown.add(stage)
            predicted = stages[stage].parameters if stage in stages else None
            where = f"tensor rank {tensor}, pipeline rank {stage}"
            figures.append(Figure(field="rank.parameters", measured=count, predicted=predicted, where=where))
    return figures


def _memory(log: RunLog, report: Report) -> list[Figure]:
    """The memory of one rank of each pipeline stage: of those in the log the one with the highest peak."""
    highest: dict[int, tuple[int, int, RankClass]] = {}
    for rank, memory in log.memory.items():
        known = class_of(report, rank)
        if known is not None:
            candidate = (memory.peak_allocated, -rank, known)
            before = highest.get(known.pipeline_rank)
            if before is None or candidate[:2] > before[:2]:
                highest[known.pipeline_rank] = candidate
    figures = []
    for _, (_, negative, known) in sorted(highest.items()):
        memory, predicted = log.memory[-negative], known.memory
        first = memory.iteration == 1
        peak = predicted.peak_allocated_first_iteration_bytes if first else predicted.peak_allocated_bytes
        rows: list[tuple[str, int, int | None]] = [
            ("allocated_bytes", memory.allocated, predicted.allocated_bytes),
            ("peak_allocated_first_iteration_bytes" if first else "peak_allocated_bytes", memory.peak_allocated, peak),
            ("peak_reserved_bytes", memory.peak_reserved, None if first else predicted.peak_reserved_bytes),
        ]
        figures += [
            Figure(field=f"rank.memory.{name}", measured=value, predicted=other, where=f"rank {-negative}")
            for name, value, other in rows
        ]
    return figures


def class_of(report: Report, rank: int) -> RankClass | None:
    """The rank class of a global rank; None if the launch has fewer ranks."""
    return next((each for each in report.ranks if any(first <= rank <= last for first, last in each.ranks)), None)
