"""Factors of the efficiencies that a log can tell, and how much each would have to change to explain a measured iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from typing import Final

from analyzer.results import Report
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.estimate import TimeInputs, iteration_of, rates_of

FACTORS: Final = ("clock", "network", "host_call")
"""Factors that `--info-calibration` fits to logs."""
CAUSES: Final = (*FACTORS, "nvlink", "memory")
"""Factors that `--info-log` looks at."""
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "clock": ("clock",),
    "network": ("network", "expert_network"),
    "host_call": ("host_call",),
    "nvlink": ("nvlink", "expert_nvlink"),
    "memory": ("memory", "memory_permute"),
}
"""Fields of `Efficiencies` that a factor multiplies."""
WIDTHS: Final[Mapping[str, float]] = {"clock": 0.1, "network": 0.5, "host_call": 0.2, "nvlink": 0.15, "memory": 0.05}
"""How far ln of a factor is expected to be from 0.

Those of the priors in `tools/fit_time.py`, except for the network: machines with the same GPU have different ones.
"""
SLOWER_IF_LARGER: Final = frozenset({"host_call"})
"""Factors of seconds. Others are of speeds."""
NO_SHARES: Final = frozenset({"host_call", "network"})
"""Factors that may be larger than the share that remains to 1: seconds, and the network, whose bandwidth is not that of the GPU."""
LARGEST: Final = 8.0
"""The largest factor that is looked for; its inverse is the smallest."""
STEPS: Final = 14
"""Bisections of ln of a factor: to 0.01 %."""


def scaled(rates: Efficiencies, factors: Mapping[str, float]) -> Efficiencies:
    """The efficiencies with the fields of each factor multiplied by it."""
    return replace(rates, **{field: getattr(rates, field) * factor for name, factor in factors.items() for field in FIELDS[name]})


def bounds(name: str, rates: Efficiencies) -> tuple[float, float]:
    """The smallest and the largest value of a factor. Shares of a peak are at most 1."""
    largest = LARGEST if name in NO_SHARES else min(LARGEST, *(1 / getattr(rates, field) for field in FIELDS[name]))
    return 1 / LARGEST, max(1.0, largest)


def explaining(report: Report, inputs: TimeInputs, name: str, seconds: float) -> float | None:
    """The factor with which an iteration is predicted to take `seconds`; None if no factor within `bounds` does."""
    rates = rates_of(inputs)

    def predicted(factor: float) -> float:
        return iteration_of(report, replace(inputs, rates=scaled(rates, {name: factor}))).seconds

    low, high = bounds(name, rates)
    slower = predicted(1.0) < seconds
    end = high if slower == (name in SLOWER_IF_LARGER) else low
    reached = predicted(end)
    if (reached < seconds) if slower else (reached > seconds):
        return None
    near, far = 0.0, log(end)
    for _ in range(STEPS):
        middle = (near + far) / 2
        if (predicted(exp(middle)) < seconds) == slower:
            near = middle
        else:
            far = middle
    return exp((near + far) / 2)
