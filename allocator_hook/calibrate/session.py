"""A calibration: what is measured in which order, and the document that is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from allocator_hook.calibrate.choose import kernels_of_launch, standard_set, with_separate_additions
from allocator_hook.calibrate.collectives import Peers, layout_of, started_by_torchrun
from allocator_hook.calibrate.fit import MEASURABLE, fit
from allocator_hook.calibrate.items import Measured, as_json, predicted_seconds
from allocator_hook.calibrate.kernels import TorchRunner
from allocator_hook.calibrate.measure import Measurements, Runner, Show, measure
from allocator_hook.calibrate.offload import measured_offload
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.calibration import SCHEMA
from analyzer.time.efficiencies import Efficiencies, efficiencies_of

KERNEL_BUDGET: Final = 180.0
"""Seconds."""
MESSAGE_BUDGET: Final = 90.0
ALONE: Final = "collectives: torchrun did not start several processes, one for each GPU"
UNFINISHED: Final = "collectives: the run ended before they were measured"
UNEVEN: Final = "collectives: the GPUs cannot be divided into NVLink domains of equal size"
ONE_DOMAIN: Final = "the network: all GPUs of this run are in one NVLink domain or one node"
OF_TRAININGS: Final = (
    "what is hidden behind what (tp_overlap_exposed, tp_backward_exposed, cp_exposed, ep_overlap_exposed, p2p_exposed, window, "
    "slowdown), host_sync, graph_call and iteration: they are properties of a training, and keep the shipped values",
    "GEMMs in 4 bit, and the flex dispatcher (DeepEP, HybridEP)",
)


def gpu_name(environ: Mapping[str, str]) -> str:
    """The name of the GPU of this process, as the driver gives it. Selects that GPU."""
    torch.cuda.set_device(int(environ["LOCAL_RANK"]) if started_by_torchrun(environ) else 0)
    return str(torch.cuda.get_device_name())


def calibrate(
    job: TrainingJob,
    speed: SpeedSpec,
    *,
    environ: Mapping[str, str],
    disk: Path | None,
    show: Show,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any] | None:
    """Measures the GPU of this process, its host and, under torchrun, its links to the others. None on ranks other than 0.

    `save` is called with the document after the kernels, and again after the collectives, so that a failure of the network leaves
    the first one. Kernels and host are measured by rank 0, while the others wait. `disk`: a folder on the disk to measure.
    """
    shipped = replace(efficiencies_of(speed), clock=1.0)  # kernels are measured alone
    if not started_by_torchrun(environ):
        found = _kernels(job, speed, shipped, show)
        offload, failures = measured_offload(disk, show)
        result = document(found.done, [ALONE, *found.sentences(), *failures], speed, shipped, offload=offload)
        save(result)
        return result
    peers = Peers(layout_of(environ, speed.nvlink_domain))
    found, offload, failures = Measurements(), {}, []
    if peers.rank == 0:
        found = _kernels(job, speed, shipped, show)
        offload, failures = measured_offload(disk, show)
        save(document(found.done, [UNFINISHED, *found.sentences(), *failures], speed, shipped, offload=offload))
    peers.wait()
    messages = peers.measure(budget=MESSAGE_BUDGET, show=show if peers.rank == 0 else _silent)
    peers.close()
    if peers.rank:
        return None
    notes = [*notes_on(peers), *found.sentences(), *messages.sentences(), *failures]
    result = document([*found.done, *messages.done], notes, speed, shipped, peers.layout.world, offload=offload)
    save(result)
    return result


def _kernels(job: TrainingJob, speed: SpeedSpec, shipped: Efficiencies, show: Show) -> Measurements:
    runner = TorchRunner()
    runner.warm_up()
    return measured_kernels(job, speed, shipped, runner, show=show, budget=KERNEL_BUDGET)


def notes_on(peers: Peers) -> list[str]:
    """Links that no group of a run uses."""
    world, domain, nodes = peers.layout
    if world % domain:
        return [UNEVEN]
    return [ONE_DOMAIN] if world == domain or nodes == 1 else []


def measured_kernels(
    job: TrainingJob, speed: SpeedSpec, shipped: Efficiencies, runner: Runner, *, show: Show, budget: float
) -> Measurements:
    """The times of the standard set and of the kernels of a launch."""
    lists = [standard_set(), kernels_of_launch(job, speed, shipped)]
    standard, launch = lists if runner.fuses_addition else map(with_separate_additions, lists)
    return measure(standard, launch, runner, budget=budget, show=show)


def document(
    measured: Sequence[Measured],
    not_measured: Sequence[str],
    speed: SpeedSpec,
    shipped: Efficiencies,
    world: int = 1,
    *,
    offload: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of the file: schema training-info-calibration/1."""
    found = fit(measured, speed, shipped)
    fitted = replace(shipped, **found)
    kept = [name for name in MEASURABLE if name not in found]
    unchanged = [f"{', '.join(kept)}: the measured kernels do not determine them; the shipped values are kept"] if kept else []
    return {
        "schema": SCHEMA,
        "gpu": speed.name,
        **_machine(),
        "gpus": world,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "efficiencies": found,
        "offload": dict(offload),
        "not_measured": [*not_measured, *unchanged, *OF_TRAININGS],
        "measured": [
            as_json(each, predicted_seconds(each.item, speed, fitted), predicted_seconds(each.item, speed, shipped))
            for each in measured
        ],
    }


def _machine() -> dict[str, str]:
    return {
        "driver": _driver(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "transformer_engine": _engine(),
    }


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # without the library or the driver, which is known to be there, only this field is lost
        return "unknown"
    return version.decode() if isinstance(version, bytes) else str(version)


def _engine() -> str:
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return "not installed"


def _silent(_done: int, _total: int, _what: str) -> None:
    """Used on ranks other than 0."""
