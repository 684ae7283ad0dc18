"""The fit of factors to logs: which a log tells, and that it finds those that a log was made with."""

from __future__ import annotations

from math import exp

import pytest

from analyzer.communication.table import communication_rows
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.iteration import iteration_time
from analyzer.time.run_log.factors import FACTORS, FIELDS, bounds, scaled
from analyzer.time.run_log.fit import Fit, fit, solve
from analyzer.time.run_log.record import Iteration, RunLog, Timer
from analyzer.time.run_log.timers import predicted_timers
from tests.job_of import job_of
from tests.time.speeds import known

H100 = known("H100-80GB")
SHIPPED = efficiencies_of(H100)
LARGE = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --global-batch-size 64"
)


def log_with(job: TrainingJob, *, timers: bool, **factors: float) -> RunLog:
    """A log of a run whose machine has these factors."""
    stages = stage_models(job)
    rates = scaled(SHIPPED, factors)
    time = iteration_time(job, stages, communication_rows(job, stages), H100, rates)
    found = predicted_timers(job, time) if timers else {}
    return RunLog(
        path="run.log",
        iterations=[Iteration(number, time.seconds) for number in range(1, 31)],
        timers={name: [Timer(30, each.least, each.most)] for name, each in found.items()},
    )


def found_by(job: TrainingJob, *logs: RunLog) -> Fit:
    return fit(logs, job, H100, SHIPPED)


@pytest.fixture(scope="module")
def job() -> TrainingJob:
    return job_of(LARGE, base="", gpus=32)


def test_one_log_of_iterations_tells_one_factor(job: TrainingJob) -> None:
    found = found_by(job, log_with(job, timers=False, clock=0.85))
    assert list(found.factors) == ["clock"]
    assert list(found.not_told) == ["network", "host_call"]
    assert 0.85 < found.factors["clock"] < 0.9  # the prior holds it back
    assert found.before < 0.95
    assert found.before < found.after == pytest.approx(1, abs=0.03)
    assert found_by(job, *(log_with(job, timers=False, clock=0.85),) * 20).factors["clock"] == pytest.approx(0.85, abs=0.005)


def test_timers_tell_the_network_as_well() -> None:
    """Each rank of a data-parallel group is on another node."""
    job = job_of(f"{LARGE} --tensor-model-parallel-size 8", base="", gpus=32)
    found = found_by(job, *(log_with(job, timers=True, clock=0.9, network=0.5),) * 3)
    assert list(found.factors) == ["clock", "network"]
    assert found.factors["clock"] == pytest.approx(0.9, abs=0.03)
    assert found.factors["network"] == pytest.approx(0.5, abs=0.05)


def test_a_run_that_the_host_limits_tells_the_host() -> None:
    small = job_of(LARGE.replace("4096", "512"), base="", gpus=1)
    found = found_by(small, log_with(small, timers=False, host_call=1.3))
    assert list(found.factors) == ["host_call"]
    assert found.factors["host_call"] == pytest.approx(1.3, abs=0.06)


def test_nothing_changes_if_the_log_agrees(job: TrainingJob) -> None:
    found = found_by(job, log_with(job, timers=True))
    assert all(value == pytest.approx(1, abs=1e-6) for value in found.factors.values())


def test_shares_stay_at_most_one(job: TrainingJob) -> None:
    found = found_by(job, *(log_with(job, timers=False, clock=4.0),) * 20)
    assert max(getattr(scaled(SHIPPED, found.factors), name) for name in FIELDS["clock"]) <= 1 + 1e-9
    assert bounds("network", SHIPPED)[1] > 1 / SHIPPED.network


def test_every_factor_multiplies_its_fields_only() -> None:
    for name in FACTORS:
        changed = scaled(SHIPPED, {name: exp(0.1)})
        differing = {field for field in SHIPPED.__dataclass_fields__ if getattr(changed, field) != getattr(SHIPPED, field)}
        assert differing == set(FIELDS[name])


def test_linear_equations() -> None:
    assert solve([[4, 1, 0], [1, 3, 1], [0, 1, 2]], [6, 10, 8]) == pytest.approx([1, 2, 3])
