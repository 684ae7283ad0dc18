"""What the time of a launch depends on, from the options of this program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.hardware.speeds import read_speeds, speed_of
from analyzer.time.estimate import TimeInputs
from analyzer.time.run_length import run_spec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.info_options import InfoOptions
    from analyzer.specs import TrainingJob

GIGA = 1e9


def time_inputs(
    options: InfoOptions, arguments: Arguments, *, gpu: str | None, folder: Path, job: TrainingJob | None = None
) -> TimeInputs | None:
    """The inputs of the time model; None if the speeds of the GPU are not known. Raises InputError for an invalid file.

    `job`: the training, which logs in `--info-calibration` are of; None for inference.
    """
    network = None if options.network is None else GIGA * options.network
    if options.hardware is not None:
        speed = read_speeds(folder / options.hardware, network=network)
    else:
        known = speed_of(gpu, network=network) if gpu is not None else None
        if known is None:
            return None
        speed = known
    rates, source, share = None, "", None
    if options.efficiency:
        for field in ("network", "calibration"):
            if getattr(options, field):
                raise InputError("--info-efficiency", f"does not use --info-{field}", "leave one of the two out")
        share = dict(options.efficiency)["flops"]
        source = f"--info-efficiency: {share:.0%} of the peak, without communication, bubble and memory-bound kernels"
    elif options.calibration:
        from analyzer.time.run_log.calibrate import read_efficiencies

        rates, source = read_efficiencies(options.calibration, folder, speed, job)
    return TimeInputs(
        speed=speed,
        rates=rates,
        flops_share=share,
        memory_share=dict(options.efficiency).get("memory", 1.0),
        calibration=source,
        run=run_spec(arguments),
        tokens=options.tokens,
        price=options.price,
    )
