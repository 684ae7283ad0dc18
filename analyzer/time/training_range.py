"""The interval that the time of an iteration probably lies in, from the errors of runs that took no part in the fit."""

from __future__ import annotations

from typing import Final

from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import shipped
from analyzer.time.iteration import IterationTime
from analyzer.time.kernels.tables import measured_gpu

HOST_BOUND: Final = 0.1
"""Share of an iteration in which the GPU waits for the host, from which on the time of the host decides."""
OTHER_GPU: Final = 0.05
"""Further error on a GPU without measured iterations, on both sides. Assumed: the GPUs of the fit share much of their software."""
OTHER_KERNELS: Final = 0.15
"""The same on a GPU without measured kernels: the ceilings of the GPUs with tables differ by 15 % from their mean."""


def range_of(job: TrainingJob, time: IterationTime, speed: SpeedSpec) -> tuple[float, float]:
    """Seconds that nine of ten measured iterations of the same kind lie between.

    The kinds are launches that the host limits, dense and MoE models on GPUs with measured iterations, and on other GPUs. The
    errors are those of `tools/fit_time.py --left-out`: of each model and source left out of the fit, on other GPUs of each GPU left
    out, and they are wider by `OTHER_GPU`, or by `OTHER_KERNELS` if the kernels are those of another GPU too.
    """
    kind = kind_of(job, time, speed)
    found = shipped()["errors"]["intervals"][kind]
    wider = 0.0
    if speed.name not in shipped()["errors"]["gpus"]:
        wider = OTHER_GPU if measured_gpu(speed) == speed.name else OTHER_KERNELS
    return time.seconds / (1 + float(found["upper"]) + wider), time.seconds / (1 + float(found["lower"]) - wider)


def kind_of(job: TrainingJob, time: IterationTime, speed: SpeedSpec) -> str:
    """The kind of a launch by which errors are grouped."""
    if time.parts["host"] > HOST_BOUND * time.seconds:
        return "host_bound"
    kind = "moe" if job.model.moe is not None else "dense"
    return kind if speed.name in shipped()["errors"]["gpus"] else f"{kind}_on_another_gpu"
