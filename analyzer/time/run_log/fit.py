"""`--info-calibration` with logs: fits the factors that they can tell.

The errors of ln(measured / predicted) and the factors have normal distributions around 0, the factors with the widths of
`factors.WIDTHS`. A factor is used if the logs more than halve its variance; the others stay at 1. One log with nothing but the time
of iterations tells one factor: usually the clock, by which GEMMs and attention differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final, NamedTuple

from analyzer.communication.table import communication_rows
from analyzer.modules.stage import StageModel
from analyzer.passes.stages import stage_models, without_equal
from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.iteration import iteration_time
from analyzer.time.run_log.factors import FACTORS, WIDTHS, bounds, scaled
from analyzer.time.run_log.record import RunLog, measured
from analyzer.time.run_log.timers import predicted_timers

ERRORS: Final[Mapping[str, float]] = {
    "iteration": 0.031,
    "forward-compute": 0.1,
    "backward-compute": 0.1,
    "all-grads-sync": 0.3,
}
"""Standard deviations of ln of what is measured.

That of an iteration is the difference of repeated measurements (docs/time.md). Timers synchronize the GPU, and the last one also
contains the wait for the slowest rank.
"""
TOLD: Final = 0.5
"""A factor is used if its variance with the logs is at most this share of that without."""
ROUNDS: Final = 10
"""Steps of the Gauss-Newton method. The best of their results is used."""
STEP: Final = 0.01
"""Least change of ln of a factor for derivatives.

The first change is the width of its prior, and each round halves it: a network that is slower than NVLink only below some bandwidth
has no derivative at 1.
"""
LEAST: Final = 0.01
"""Share of an iteration below which a timer is not used."""


class Observation(NamedTuple):
    """A measured time."""

    name: str
    """A field of `ERRORS`."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Factors that were fitted."""

    factors: Mapping[str, float]
    """Those that the logs tell."""
    not_told: Sequence[str]
    """Those that stay at 1."""
    before: float
    """Predicted seconds of an iteration over the measured ones (of several logs the geometric mean), without the factors."""
    after: float
    """The same with them."""


class _Model:
    """Predicts the times of a job with factors."""

    def __init__(self, job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> None:
        self.job, self.speed, self.rates = job, speed, rates
        self.stages: Sequence[StageModel] = stage_models(job)
        self.rows: Sequence[CommunicationRow] = communication_rows(job, without_equal(self.stages))

    def seconds(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Seconds of an iteration and of its timers. `logs`: ln of each factor."""
        rates = scaled(self.rates, {name: exp(value) for name, value in logs.items()})
        time = iteration_time(self.job, self.stages, self.rows, self.speed, rates)
        timers = {name: each.most for name, each in predicted_timers(self.job, time).items()}
        return {"iteration": time.seconds, **timers}


def fit(logs: Sequence[RunLog], job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> Fit:
    """The factors of `FACTORS` that logs of one launch tell. `rates` are the efficiencies that they multiply."""
    model = _Model(job, speed, rates)
    start = model.seconds({})
    seen = [each for log_of_run in logs for each in _observations(log_of_run, start)]
    slopes = _slopes(model, dict.fromkeys(FACTORS, 0.0), seen, share=1.0)
    shares = _variances(slopes, seen)
    told = [name for name in FACTORS if shares[name] <= TOLD] or [min(FACTORS, key=lambda name: shares[name])]
    at = best = dict.fromkeys(told, 0.0)
    for number in range(ROUNDS):
        slopes = _slopes(model, at, seen, share=0.5**number)
        at = _next(at, slopes, model.seconds(at), seen, rates)
        best = min((best, at), key=lambda each: _error(each, model.seconds(each), seen))
    at = best
    errors = [log(start["iteration"] / each.seconds) for each in seen if each.name == "iteration"]
    end = model.seconds(at)["iteration"]
    mean = exp(sum(errors) / len(errors))
    return Fit(
        factors={name: exp(value) for name, value in at.items()},
        not_told=[name for name in FACTORS if name not in at],
        before=mean,
        after=mean * end / start["iteration"],
    )


def calibrated(rates: Efficiencies, found: Fit) -> Efficiencies:
    """The efficiencies with the fitted factors."""
    return scaled(rates, found.factors)


def _observations(run: RunLog, predicted: Mapping[str, float]) -> list[Observation]:
    """What a log measured that the model predicts."""
    found = measured(run)
    timers = [
        Observation(name, most)
        for name, (_, most) in found.timers.items()
        if name in ERRORS and most > 0 and predicted.get(name, 0.0) > LEAST * predicted["iteration"]
    ]
    return [Observation("iteration", found.seconds), *timers]


def _error(at: Mapping[str, float], predicted: Mapping[str, float], seen: Sequence[Observation]) -> float:
    """The sum of squares that is minimized."""
    errors = sum((log(each.seconds / predicted[each.name]) / ERRORS[each.name]) ** 2 for each in seen)
    return errors + sum((value / WIDTHS[name]) ** 2 for name, value in at.items())


def _slopes(model: _Model, at: Mapping[str, float], seen: Sequence[Observation], *, share: float) -> dict[str, list[float]]:
    """For each factor the central differences of ln of the predicted times by ln of the factor, over `share` of its width."""
    found = {}
    for name in at:
        step = max(STEP, share * WIDTHS[name])
        more, less = (model.seconds({**at, name: at[name] + change}) for change in (step, -step))
        found[name] = [log(more[each.name] / less[each.name]) / (2 * step) for each in seen]
    return found


def _normal(slopes: Mapping[str, Sequence[float]], seen: Sequence[Observation]) -> list[list[float]]:
    """The matrix of the normal equations, with the priors."""
    weights = [1 / ERRORS[each.name] ** 2 for each in seen]
    return [
        [
            sum(weight * a * b for weight, a, b in zip(weights, slopes[row], slopes[column], strict=True))
            + (1 / WIDTHS[row] ** 2 if row == column else 0.0)
            for column in slopes
        ]
        for row in slopes
    ]


def _variances(slopes: Mapping[str, Sequence[float]], seen: Sequence[Observation]) -> dict[str, float]:
    """The variance of each factor with the observations, over that of its prior."""
    matrix = _normal(slopes, seen)
    found = {}
    for index, name in enumerate(slopes):
        unit = [float(row == index) for row in range(len(matrix))]
        found[name] = solve(matrix, unit)[index] / WIDTHS[name] ** 2
    return found


def _next(
    at: Mapping[str, float],
    slopes: Mapping[str, Sequence[float]],
    predicted: Mapping[str, float],
    seen: Sequence[Observation],
    rates: Efficiencies,
) -> dict[str, float]:
    """The factors after one step, within their bounds."""
    errors = [log(each.seconds / predicted[each.name]) / ERRORS[each.name] ** 2 for each in seen]
    right = [
        sum(slope * error for slope, error in zip(slopes[name], errors, strict=True)) - at[name] / WIDTHS[name] ** 2 for name in at
    ]
    moved = solve(_normal(slopes, seen), right)
    found = {}
    for name, change in zip(at, moved, strict=True):
        low, high = bounds(name, rates)
        found[name] = min(max(at[name] + change, log(low)), log(high))
    return found


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution of a few linear equations with a positive definite matrix, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            share = rows[row][pivot] / rows[pivot][pivot]
            rows[row] = [a - share * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found
