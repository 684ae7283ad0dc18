"""The efficiencies of `--info-calibration`: a file that `--info-calibrate` wrote, and logs of runs of the launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.specs.speed import SpeedSpec
from analyzer.time.calibration import OPTION, REMEDY, read_calibration
from analyzer.time.efficiencies import Efficiencies, efficiencies_of
from analyzer.time.run_log.read import looks_like_json, parse_file

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.time.run_log.record import RunLog

NAMES: Final = {
    "clock": "speed of GEMMs and attention",
    "network": "bandwidth of the network",
    "host_call": "time of the host for an operation",
}
"""Names of the factors."""


def read_efficiencies(files: Sequence[str], folder: Path, speed: SpeedSpec, job: TrainingJob | None) -> tuple[Efficiencies, str]:
    """The efficiencies for a GPU, and where they are from.

    `files` are relative to `folder`: at most one that `--info-calibrate` wrote, and logs of runs of `job`, to which factors are
    fitted. `job` is None for inference. Raises InputError for files that are neither, and for logs of another launch.
    """
    measured = [file for file in files if looks_like_json(folder / file)]
    if len(measured) > 1:
        raise InputError(OPTION, f"'{measured[0]}' and '{measured[1]}' are both calibrations", "give one of them, and logs of runs")
    logs = [_log(file, folder) for file in files if file not in measured]
    rates = read_calibration(folder / measured[0], speed) if measured else efficiencies_of(speed)
    source = f"measured: {measured[0]}" if measured else ""
    if not logs:
        return rates, source
    if job is None:
        raise InputError(OPTION, f"'{logs[0].path}' is the log of a training, and inference is analyzed", REMEDY)
    rates, fitted = _fitted(logs, job, speed, rates)
    return rates, f"{source}; {fitted}" if source else fitted


def _log(file: str, folder: Path) -> RunLog:
    found = parse_file(folder / file, OPTION, f"{REMEDY}, or the log of a Megatron run")
    if found is None:
        fault = f"'{file}' is not JSON, and has no iteration of a training as the log of a run"
        raise InputError(OPTION, fault, f"{REMEDY}, or the log of a Megatron run")
    return found


def _fitted(logs: Sequence[RunLog], job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> tuple[Efficiencies, str]:
    """The efficiencies with the factors that the logs tell, and a sentence about them."""
    from analyzer.time.run_log.fit import calibrated, fit
    from analyzer.time.run_log.launch import other_sizes
    from analyzer.time.run_log.record import measured

    for each in logs:
        if texts := other_sizes(each, measured(each), job):
            raise InputError(
                OPTION, f"'{each.path}' is the log of another launch: {texts[0].rstrip('.')}", "give the log of this launch"
            )
    found = fit(logs, job, speed, rates)
    factors = ", ".join(f"{NAMES[name]} × {value:.3f}" for name, value in found.factors.items())
    text = f"fitted to {', '.join(each.path for each in logs)}: {factors}"
    if found.not_told:
        text += f"; not told by {'the log' if len(logs) == 1 else 'the logs'}: {', '.join(NAMES[name] for name in found.not_told)}"
    return calibrated(rates, found), f"{text}; predicted over measured time {found.before:.3f} before and {found.after:.3f} after"
