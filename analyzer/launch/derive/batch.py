"""Samples of an iteration and microbatches per data-parallel rank.

Megatron: `validate_args`, and megatron/core/num_microbatches_calculator.py (0.16.1; the schedule of thresholds: 0.18).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.reading import option, positive, required, since, switched_on
from analyzer.specs import BatchSpec, ParallelSpec
from analyzer.specs.rules.violation import multiple_near
from analyzer.units import natural

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

_SUFFIXES: Final = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_spec(launch: LaunchInput, *, parallel: ParallelSpec, seq_length: int) -> BatchSpec:
    """Batch sizes of the first and of a full iteration. Raises InputError if a batch cannot be split over the data-parallel ranks.

    Megatron's default is one microbatch per data-parallel rank. The interleaved schedule fails with that, so the smallest number
    that it runs with is assumed.
    """
    arguments, data = launch.arguments, parallel.data
    least = 1 if parallel.virtual_pipeline is None else parallel.microbatch_group_size or parallel.pipeline
    micro = required(arguments, "micro_batch_size", "1")
    given = positive(arguments, "global_batch_size")
    _check_length(arguments)
    sizes = _sizes(launch, full=given or micro * data * least, given=given is not None)
    if least > 1 and given is None and len(sizes) == 1:
        launch.warn(
            f"--global-batch-size is not given, and one microbatch is too few for virtual stages: {sizes[0]} is assumed, the "
            "smallest size that the schedule runs with."
        )
    sizes = _after_rampup(launch, sizes, micro=micro, data=data)
    for size in sizes:
        _check_divisible(arguments, size=size, micro=micro, data=data)
    _check_evaluation(arguments, full=sizes[-1], micro=micro, data=data)
    return BatchSpec(
        micro_batch_size=micro,
        global_batch_size=sizes[-1],
        seq_length=seq_length,
        microbatches=sizes[-1] // (micro * data),
        first_microbatches=sizes[0] // (micro * data),
    )


def _check_length(arguments: Arguments) -> None:
    """Training is counted in iterations or in samples."""
    if arguments.get("train_iters") is None:
        return
    for dest in ("train_samples", "lr_decay_samples", "lr_warmup_samples"):
        if arguments.get(dest):
            raise InputError(option(arguments, dest), "contradicts --train-iters", "count in iterations or in samples, not in both")


def _sizes(launch: LaunchInput, *, full: int, given: bool) -> list[int]:
    """Global batch sizes of the training in order, the full one last; only those that must be checked."""
    arguments = launch.arguments
    schedule = arguments.get("step_batch_size_schedule")
    if schedule:
        if given:
            raise InputError(
                option(arguments, "step_batch_size_schedule"), "contradicts --global-batch-size", "keep one of the two"
            )
        return _scheduled_sizes(arguments, str(schedule))
    rampup = arguments.get("rampup_batch_size")
    if not rampup:
        return [full]
    named = option(arguments, "rampup_batch_size")
    if since(arguments, "0.18"):
        launch.warn(f"Megatron {arguments.release} accepts {named} and ignores it: every iteration has the full batch.")
        return [full]
    if arguments.get("train_iters") is not None:
        raise InputError(named, "cannot be used with --train-iters", "count the training with --train-samples, or leave it out")
    return _rampup_sizes(named, rampup, full=full)


def _is_count(value: object) -> bool:
    """Whether Python's `int` reads it as a number of 0 or more; '9_765_625' is one."""
    digits = str(value).replace("_", "")
    return natural(digits) is not None and re.fullmatch(r"\d+(_\d+)*", str(value)) is not None


def _rampup_sizes(named: str, rampup: object, *, full: int) -> list[int]:
    """START, the size after it, and the full batch: if these can be split over the replicas, so can every size between."""
    if not isinstance(rampup, list | tuple) or len(rampup) != 3 or not all(_is_count(each) for each in rampup):
        raise InputError(named, f"{rampup!r} is not three numbers", "give START INCREMENT SAMPLES")
    start, increment, samples = (int(each) for each in rampup)
    if start == 0 or increment == 0:
        raise InputError(named, f"{start} {increment} {samples} starts or increases with 0", "give START and INCREMENT above 0")
    if start >= full:
        raise InputError(named, f"it starts at {start} and the full batch is {full}", f"start below {full}, or leave it out")
    if (full - start) % increment:
        raise InputError(
            named, f"from {start} to {full} is not a multiple of {increment}", f"use an increment that divides {full - start}"
        )
    return [start, start + increment, full]


def _after_rampup(launch: LaunchInput, sizes: list[int], *, micro: int, data: int) -> list[int]:
    """`sizes`, or only the full size if the others cannot be split over the replicas and the training continues from a checkpoint.

    Megatron checks the size of the iterations that it runs (`RampupBatchsizeNumMicroBatchesCalculator.update`), so after the
    ramp-up the number of replicas may be larger.
    """
    arguments = launch.arguments
    *earlier, full = sizes
    split = micro * data
    if arguments.get("rampup_batch_size") and arguments.get("load") and any(size % split for size in earlier) and full % split == 0:
        named = option(arguments, "rampup_batch_size")
        launch.assume(f"The ramp-up of {named} is assumed to be over: its sizes cannot be split over {data} data-parallel ranks.")
        return [full]
    return sizes


def _scheduled_sizes(arguments: Arguments, schedule: str) -> list[int]:
    """The sizes of '0:768 250B:1536', ordered by their thresholds in tokens."""
    steps = []
    for step in schedule.split():
        threshold, _, size = step.partition(":")
        scale = _SUFFIXES.get(threshold[-1:].upper(), 1)
        try:
            steps.append((float(threshold.rstrip("KMBTkmbt")) * scale, int(size)))
        except ValueError:
            raise InputError(
                option(arguments, "step_batch_size_schedule"), f"{step!r} is not THRESHOLD:SIZE", "write it as '0:768 250B:1536'"
            ) from None
    if not steps or min(size for _, size in steps) <= 0:
        raise InputError(
            option(arguments, "step_batch_size_schedule"), "it has no batch size above 0", "write it as '0:768 250B:1536'"
        )
    return [size for _, size in sorted(steps)]


def _check_divisible(arguments: Arguments, *, size: int, micro: int, data: int) -> None:
    if size >= micro * data and (size % (micro * data) == 0 or switched_on(arguments, "decrease_batch_size_if_needed")):
        return
    ramping = "rampup_batch_size" if arguments.get("rampup_batch_size") else "step_batch_size_schedule"
    dest = "global_batch_size" if size == arguments.get("global_batch_size") else ramping
    raise InputError(
        option(arguments, dest),
        f"a batch of {size} cannot be split into microbatches of {micro} for {data} data-parallel replicas",
        f"use a multiple of {micro * data}, for example {multiple_near(size, micro * data)}",
    )


def _check_evaluation(arguments: Arguments, *, full: int, micro: int, data: int) -> None:
    """From 0.18 on, `validate_args` checks that the evaluation batch divides."""
    if not since(arguments, "0.18"):
        return
    size = positive(arguments, "eval_global_batch_size") or full
    each = positive(arguments, "eval_micro_batch_size") or micro
    if size % (each * data):
        raise InputError(
            option(arguments, "eval_global_batch_size"),
            f"an evaluation batch of {size} cannot be split into microbatches of {each} for {data} replicas",
            f"use a multiple of {each * data}",
        )
