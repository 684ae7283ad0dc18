"""The length of a training: iterations, evaluation, checkpoints and cost, computed by hand or by Megatron's own loop.

Source: megatron/training/training.py `update_train_iters`, `train`, `pretrain`; megatron/core/num_microbatches_calculator.py.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analyzer.results import TrainingTime
from analyzer.specs.run import RunSpec
from analyzer.time.iteration import PARTS, IterationTime
from analyzer.time.pass_seconds import PassSeconds
from analyzer.time.pipeline import RankTime
from analyzer.time.training import DAY, training_time
from tests.examples import examples
from tests.job_of import job_of

FULL, MICROBATCHES, GPUS = 64, 8, 8
SECONDS = 10.0
"""An iteration: eight microbatches of 0.4 + 0.8 seconds, and 0.4 seconds besides."""
TIME = IterationTime(
    seconds=SECONDS,
    pipeline_rank=0,
    parts=dict.fromkeys(PARTS, 0.0),
    ranks=(RankTime(passes=MICROBATCHES),),
    passes=(((PassSeconds(gemm=0.4), PassSeconds(gemm=0.8)),),),
    message=0.0,
)
JOB = job_of(f"--global-batch-size {FULL}", gpus=GPUS)
PARAMETERS = 10**9


def totals(run: RunSpec, *, tokens: int | None = None, price: float | None = None) -> TrainingTime:
    found = training_time(JOB, run, TIME, tokens=tokens, parameters=PARAMETERS, price=price)
    assert found is not None
    return found


def test_a_launch_without_a_length_has_no_totals() -> None:
    assert training_time(JOB, RunSpec(), TIME, tokens=None, parameters=PARAMETERS, price=2.0) is None


def test_iterations() -> None:
    found = totals(RunSpec(train_iters=1000), price=2.5)
    assert (found.iterations, found.tokens) == (1000, 1000 * 64 * 2048)
    assert found.days == pytest.approx(10_000 / 86_400)
    assert found.gpu_hours == pytest.approx(8 * 10_000 / 3600)
    assert found.cost == pytest.approx(2.5 * 8 * 10_000 / 3600)


def test_samples_of_a_partial_batch_are_left_out() -> None:
    """`args.train_samples // args.global_batch_size`."""
    assert totals(RunSpec(train_samples=6399)).iterations == 99
    assert totals(RunSpec(train_samples=6400)).iterations == 100


def test_tokens_take_precedence() -> None:
    found = totals(RunSpec(train_iters=1000), tokens=10 * 64 * 2048)
    assert found.iterations == 10
    assert found.days * DAY == pytest.approx(100)


def loop_of_megatron(samples: int, full: int, rampup: tuple[int, int, int]) -> list[int]:
    """The global batch size of each iteration: `update_train_iters` until the ramp-up has ended, and then whole batches."""
    start, increment, ramp = rampup
    samples_of_increment = ramp / ((full - start) // increment)
    consumed, sizes = 0, []
    while consumed <= ramp:
        size = full if consumed > ramp else start + int(consumed / samples_of_increment) * increment
        consumed += size
        sizes.append(size)
    return sizes + [full] * ((samples - consumed) // full)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@example(8, 7, 100)
@example(16, 3, 1000)
@example(8, 1, 640)
@given(st.sampled_from((8, 16, 32)), st.sampled_from((1, 2, 4, 8, 16, 32)), st.integers(1, 5000))
def test_the_ramp_up_of_the_batch_size(start: int, increment: int, ramp: int) -> None:
    full = start + (FULL - start) // increment * increment
    if full != FULL:
        increment = FULL - start
    samples = ramp + 20 * FULL
    sizes = loop_of_megatron(samples, FULL, (start, increment, ramp))
    found = totals(RunSpec(train_samples=samples, rampup=(start, increment, ramp)))
    assert found.iterations == len(sizes)
    # each iteration has 0.4 seconds, and 1.2 for each of its microbatches of eight samples
    assert found.training_days * DAY == pytest.approx(sum(0.4 + 1.2 * size / 8 for size in sizes))


def test_evaluation() -> None:
    """1,000 iterations with one evaluation in 250 are four; two follow at the end. Each has 20 batches of forwards."""
    found = totals(RunSpec(train_iters=1000, eval_interval=250, eval_iters=20))
    assert found.evaluation_days * DAY == pytest.approx(6 * 20 * 8 * 0.4)
    assert found.days * DAY == pytest.approx(10_000 + 6 * 20 * 8 * 0.4)
    assert totals(RunSpec(train_iters=1000, eval_interval=250)).evaluation_days == 0


def test_the_bytes_of_a_checkpoint() -> None:
    """14 bytes for each parameter: two of the weight, and master weight and two moments of Adam in fp32."""
    saves = {"train_iters": 1000, "saves": True, "save_interval": 100}
    assert totals(RunSpec(**saves)).checkpoint_bytes == 14 * PARAMETERS  # type: ignore[arg-type]
    assert totals(RunSpec(**saves, saves_optimizer=False)).checkpoint_bytes == 2 * PARAMETERS  # type: ignore[arg-type]
    assert totals(RunSpec(train_iters=1000)).checkpoint_bytes == 0


@pytest.mark.parametrize(("interval", "count"), [(100, 10), (300, 4), (1000, 1), (5000, 1)])
def test_the_last_iteration_is_saved(interval: int, count: int) -> None:
    """Megatron saves after the training if the last iteration was not a multiple of the interval."""
    found = totals(RunSpec(train_iters=1000, saves=True, save_interval=interval))
    assert found.checkpoint_days * DAY == pytest.approx(count * 14 * PARAMETERS / 2e9)
    assert totals(RunSpec(train_iters=1000, saves=True, save_interval=interval, asynchronous_save=True)).checkpoint_days == 0
