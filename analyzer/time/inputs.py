"""What the time of a launch depends on, from the options of this program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.hardware.speeds import read_speeds, speed_of
from analyzer.launch.derive.run import run_spec
from analyzer.time.calibration import read_calibration
from analyzer.time.efficiencies import uniform
from analyzer.time.estimate import TimeInputs

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.info_options import InfoOptions

GIGA = 1e9


def time_inputs(options: InfoOptions, arguments: Arguments, *, gpu: str | None, folder: Path) -> TimeInputs | None:
    """The inputs of the time model; None if the speeds of the GPU are not known. Raises InputError for an invalid file."""
    network = None if options.network is None else GIGA * options.network
    if options.hardware is not None:
        speed = read_speeds(folder / options.hardware, network=network)
    else:
        known = speed_of(gpu, network=network) if gpu is not None else None
        if known is None:
            return None
        speed = known
    rates, source = None, ""
    if options.efficiency:
        shares = dict(options.efficiency)
        rates = uniform(flops=shares["flops"], memory=shares["memory"])
        source = f"--info-efficiency: {shares['flops']:.0%} of the peak, {shares['memory']:.0%} of the memory bandwidth"
    elif options.calibration is not None:
        rates = read_calibration(folder / options.calibration, speed)
        source = f"measured: {options.calibration}"
    return TimeInputs(
        speed=speed, rates=rates, calibration=source, run=run_spec(arguments), tokens=options.tokens, price=options.price
    )
