"""The linear program: the shares of weights, cache and activations on each tier that take the least time for a block.

The time of a block is a sum of maxima of linear functions of the shares. Each maximum becomes a variable that is at least each of
the functions, so the program is exact for shares that apply to every tensor alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.inference.offload.linear import Linear
from analyzer.inference.offload.memory import limits, tiers
from analyzer.inference.offload.policy import Placement, Shares
from analyzer.inference.offload.steps import steps
from analyzer.inference.offload.work import Case

SHARES: Final = 9
"""Variables: weights, cache and activations, each on the GPU, in host memory, on disk."""
PREFERENCE: Final = (0.0, 1e-7, 1e-6) * 3
"""Seconds added for each variable, so that of equal times the one with the least on disk is found."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Tiers that the cache and the activations may be on; the weights may be on any. Each is a tuple of gpu, host, disk."""

    weights: tuple[bool, bool, bool] = (True, True, True)
    cache: tuple[bool, bool, bool] = (True, True, True)
    activations: tuple[bool, bool, bool] = (True, True, True)


def optimum(case: Case, allowed: Allowed) -> tuple[Placement, float] | None:
    """The placement that takes the least time for a block, and that time in seconds; None if nothing fits.

    Raises InputError without scipy.
    """
    rows, costs = _rows(case)
    memory = [
        ([*function.coefficients(), *[0.0] * len(costs)], limit - function.constant)
        for function, limit in zip(tiers(case), limits(case.machine), strict=True)
    ]
    # bytes in units of the limit, so that all rows have like magnitudes
    memory = [
        ([factor / limit for factor in row], room / limit) for (row, room), limit in zip(memory, limits(case.machine), strict=True)
    ]
    above = [*rows, *memory]
    bounds = [(0.0, 1.0 if may else 0.0) for group in (allowed.weights, allowed.cache, allowed.activations) for may in group]
    sums = [[float(3 * group <= column < 3 * group + 3) for column in range(SHARES)] + [0.0] * len(costs) for group in range(3)]
    result = _solver()(
        [*PREFERENCE, *costs],
        A_ub=[row for row, _ in above],
        b_ub=[limit for _, limit in above],
        A_eq=sums,
        b_eq=[1.0, 1.0, 1.0],
        bounds=bounds + [(0.0, None)] * len(costs),
        method="highs",
    )
    if result.status != 0:
        return None
    found = [min(1.0, max(0.0, float(share))) for share in result.x[:SHARES]]
    return Placement(Shares(*found[0:3]), Shares(*found[3:6]), Shares(*found[6:9])), float(result.fun)


def _rows(case: Case) -> tuple[list[tuple[list[float], float]], list[float]]:
    """The rows `activity <= seconds of its step`, and the cost of a second of each step."""
    of_case = [(step, 1.0) for step in steps(case, prefill=True)]
    of_case += [(step, float(case.lengths.generated - 1)) for step in steps(case, prefill=False)]
    rows: list[tuple[list[float], float]] = []
    for index, (step, _) in enumerate(of_case):
        for activity in step.activities:
            if activity != Linear():
                columns = [0.0] * len(of_case)
                columns[index] = -1.0
                rows.append(([*activity.coefficients(), *columns], -activity.constant))
    return rows, [step.count * passes for step, passes in of_case]


def _solver() -> Any:
    """scipy's linprog. Raises InputError if scipy is not installed."""
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise InputError("--info-offload", "a search needs scipy", "pip install 'get-training-info[offload]'") from None
    return linprog
