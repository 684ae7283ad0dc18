"""The interval that the time of an iteration probably lies in, from the errors of runs that took no part in the fit."""

from __future__ import annotations

from typing import Final

from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import shipped
from analyzer.time.iteration import IterationTime

HOST_BOUND: Final = 0.1
"""Share of an iteration in which the GPU waits for the host, from which on the time of the host decides."""


def range_of(job: TrainingJob, time: IterationTime, speed: SpeedSpec) -> tuple[float, float]:
    """Seconds that nine of ten measured iterations of the same kind lie between.

    The kinds are launches that the host limits, dense and MoE models on GPUs with measured iterations, and on other GPUs. The
    errors are those of `tools/fit_time.py --left-out`: of each model and source left out of the fit, on other GPUs of each GPU left
    out.
    """
    kind = kind_of(job, time, speed)
    found = shipped()["errors"]["intervals"][kind]
    return time.seconds / (1 + float(found["upper"])), time.seconds / (1 + float(found["lower"]))


def kind_of(job: TrainingJob, time: IterationTime, speed: SpeedSpec) -> str:
    """The kind of a launch by which errors are grouped."""
    if time.parts["host"] > HOST_BOUND * time.seconds:
        return "host_bound"
    kind = "moe" if job.model.moe is not None else "dense"
    return kind if speed.name in shipped()["errors"]["gpus"] else f"{kind}_on_another_gpu"
