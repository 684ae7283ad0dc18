"""The table of optimizers: bytes of each one, and an optimizer that is added to the table alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.ranks import rank_classes
from analyzer.specs import OPTIMIZERS, OptimizerFacts, TrainingJob
from analyzer.specs.optimizer import names_of_optimizers
from analyzer.specs.run import RunSpec
from analyzer.states.bytes_per_parameter import bytes_per_parameter
from analyzer.time.optimizer_seconds import seconds_of_parameters
from analyzer.time.training import checkpoint_bytes
from tests.job_of import job_of, states_of
from tests.time.speeds import ROUND, ideal

NUMEL = 8 * (12 * 1024**2 + 13 * 1024) + (32_000 + 2048 + 2) * 1024
"""Parameters of `tests.job_of.BASE`: eight layers with biases, word and position embeddings, and the final norm."""
WORDS = "--vocab-size 31999"
"""32,000 with the padding of each release."""


@pytest.mark.parametrize(
    ("line", "release", "states"),
    [
        ("", "0.16.1", 8),  # Kingma and Ba 2014: two moments
        ("--optimizer sgd", "0.16.1", 4),
        ("--optimizer sgd --sgd-momentum 0", "0.16.1", 0),
        ("--optimizer lion", "0.17.1", 4),  # Chen et al. 2023: one moment
    ],
)
def test_states_of_each_element(line: str, release: str, states: int) -> None:
    job = job_of(f"{WORDS} {line}", gpus=1, release=release)
    each = bytes_per_parameter(job)
    assert (each.master, each.total_moments) == (4, states)
    assert states_of(job).moments == pytest.approx(states * NUMEL, rel=1e-3)


def test_messages_name_each_optimizer_once() -> None:
    assert names_of_optimizers() == "adam, sgd, lion or muon"
    assert names_of_optimizers(without="lion") == "adam, sgd or muon"


@pytest.fixture
def three_states(monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    """A job with AdEMAMix: two moments and a slow average of gradients (Pagliardini et al. 2024), here as an entry of the table."""
    facts = OptimizerFacts(name="ademamix", title="AdEMAMix", states=lambda _: ("fp32", "fp32", "bf16"), sharding="distributed")
    monkeypatch.setitem(OPTIMIZERS, "ademamix", facts)
    job = job_of(f"{WORDS} --use-distributed-optimizer", gpus=8)
    return replace(job, optimizer=replace(job.optimizer, name="ademamix"))


def test_an_entry_of_the_table_is_enough_for_another_optimizer(three_states: TrainingJob) -> None:
    adam = replace(three_states, optimizer=replace(three_states.optimizer, name="adam"))
    found, of_adam = states_of(three_states), states_of(adam)
    assert bytes_per_parameter(three_states).total_moments == 10
    assert found.moments == of_adam.moments * 10 // 8 == pytest.approx(10 * NUMEL / 8, rel=1e-3)
    assert (found.parameters, found.gradients, found.master_weights) == (
        of_adam.parameters,
        of_adam.gradients,
        of_adam.master_weights,
    )
    assert [rank_classes(job)[0].memory.optimizer_bytes for job in (three_states, adam)] == [
        states.master_weights + states.moments for states in (found, of_adam)
    ]
    # each state is read and written: 2 bytes more, twice, of an eighth of the elements
    seconds = [seconds_of_parameters(job, NUMEL, 0, ROUND, ideal()) for job in (three_states, adam)]
    assert seconds[0] - seconds[1] == pytest.approx(2 * 2 * NUMEL / 8 / ROUND.hbm_bytes)


def test_a_checkpoint_has_the_states_of_the_optimizer() -> None:
    """bf16 parameters and fp32 master weights, and a momentum only if SGD has one."""
    for momentum, number in ((0.0, 2 + 4), (0.9, 2 + 4 + 4)):
        job = job_of(f"{WORDS} --optimizer sgd --sgd-momentum {momentum}")
        assert checkpoint_bytes(job, RunSpec(saves=True, saves_optimizer=True), 1000) == number * 1000
