"""The time and the cost of a whole training, from the time of an iteration."""

from __future__ import annotations

from typing import Final

from analyzer.results import TrainingTime
from analyzer.specs import TrainingJob
from analyzer.specs.run import RunSpec
from analyzer.states.bytes_per_parameter import FP32
from analyzer.time.iteration import IterationTime
from analyzer.units import DTYPE_BYTES, ceil_div

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
STORAGE: Final = 2e9
"""Bytes per second that one node is assumed to write to shared storage for a checkpoint."""


def training_time(
    job: TrainingJob, run: RunSpec, time: IterationTime, *, tokens: int | None, parameters: int, price: float | None
) -> TrainingTime | None:
    """A training from its first to its last iteration; None if its length is not known.

    `tokens` (`--info-tokens`) takes precedence over the options of Megatron. `parameters`: those of the whole model. `price`: of
    one GPU-hour.
    """
    batch = job.batch
    samples = _samples(job, run, tokens)
    if samples is None:
        return None
    iterations, seconds = _iterations(job, run, time, samples)
    # at the end of the training the validation and the test data are evaluated
    evaluations = iterations // run.eval_interval + 2 if run.eval_interval else 0
    evaluation = evaluations * run.eval_iters * forward_seconds(job, time)
    size = checkpoint_bytes(job, run, parameters)
    saves = ceil_div(iterations, run.save_interval) if run.save_interval and size else 0  # the last iteration is always saved
    written = 0.0 if run.asynchronous_save else saves * size / (STORAGE * job.parallel.nodes)
    total = seconds + evaluation + written
    gpu_hours = total * job.parallel.world_size / HOUR
    return TrainingTime(
        iterations=iterations,
        tokens=samples * batch.seq_length,
        days=total / DAY,
        gpu_hours=gpu_hours,
        training_days=seconds / DAY,
        evaluation_days=evaluation / DAY,
        checkpoint_days=written / DAY,
        checkpoint_bytes=size,
        cost=None if price is None else price * gpu_hours,
    )


def _samples(job: TrainingJob, run: RunSpec, tokens: int | None) -> int | None:
    """Samples of the training."""
    if tokens is not None:
        return ceil_div(tokens, job.batch.seq_length)
    if run.train_samples is not None:
        return run.train_samples
    if run.train_iters is not None:
        return run.train_iters * job.batch.global_batch_size
    return None


def least_iterations(job: TrainingJob, run: RunSpec, *, tokens: int | None) -> int:
    """Iterations of a training, at least, in units of one with the whole batch; 0 if its length is not known.

    During a ramp-up an iteration with a part of the batch takes at least that part of the time.
    """
    samples = _samples(job, run, tokens)
    if samples is None:
        return 0
    return max(0, samples // job.batch.global_batch_size - (run.rampup is not None))


def _iterations(job: TrainingJob, run: RunSpec, time: IterationTime, samples: int) -> tuple[int, float]:
    """Iterations as Megatron counts them (`update_train_iters`), and their seconds.

    Iterations of the ramp-up have fewer microbatches. The time of an iteration without microbatches is assumed to be the same.
    """
    full = job.batch.global_batch_size
    if run.rampup is None:
        iterations = max(1, samples // full)
        return iterations, iterations * time.seconds
    start, increment, ramp = run.rampup
    steps = max(1, (full - start) // increment)
    fixed = time.seconds - time.microbatch_seconds * job.batch.microbatches
    iterations, consumed, seconds = 0, 0, 0.0
    for step in range(steps + 1):
        size = start + step * increment
        until = min(_end_of_step(step, steps, ramp), samples)
        count = max(0, ceil_div(until - consumed, size))
        iterations += count
        consumed += count * size
        seconds += count * (fixed + time.microbatch_seconds * job.batch.microbatches * size / full)
    rest = max(0, samples - consumed) // full
    return iterations + rest, seconds + rest * time.seconds


def _end_of_step(step: int, steps: int, ramp: int) -> int:
    """The first number of consumed samples at which a step of the ramp-up is over.

    Source: `RampupBatchsizeNumMicroBatchesCalculator.update` with its rounding (core/num_microbatches_calculator.py, 0.16.1).
    """
    if step == steps or not ramp:
        return ramp + 1
    each = ramp / steps
    near = ramp * (step + 1) // steps
    return min(next(consumed for consumed in (near, near + 1, near + 2) if int(consumed / each) > step), ramp + 1)


def forward_seconds(job: TrainingJob, time: IterationTime) -> float:
    """Seconds of an evaluation step of a global batch: forwards of all microbatches through the pipeline."""
    slowest = max(sum(forward.total for forward, _ in chunks) for chunks in time.passes)
    through = sum(forward.total for chunks in time.passes for forward, _ in chunks)
    return through + (job.batch.microbatches - 1) * slowest


def checkpoint_bytes(job: TrainingJob, run: RunSpec, parameters: int) -> int:
    """Bytes of a checkpoint: parameters, and with the optimizer master weights and moments in fp32."""
    if not run.saves:
        return 0
    weights = int(DTYPE_BYTES[job.precision.parameters])
    moments = len(job.optimizer.state_dtypes)
    masters = 0 if job.precision.parameters == "fp32" else 1
    return parameters * (weights + (FP32 * (moments + masters) if run.saves_optimizer else 0))
