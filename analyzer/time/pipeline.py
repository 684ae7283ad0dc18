"""Simulation of an iteration on all pipeline ranks: which step waits for which message, and for how long.

A step starts when the step before it on its rank has ended and its input has arrived: the output of the same microbatch on the stage
before, or the gradient of the stage after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from analyzer.schedule.pipeline import Step, steps
from analyzer.specs import TrainingJob
from analyzer.specs.release import is_before


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The sizes of a pipeline schedule."""

    pipeline: int
    chunks: int
    microbatches: int
    group_size: int | None
    legacy: bool = False
    combined: bool = False


@dataclass(kw_only=True)
class RankTime:
    """An iteration on one pipeline rank, without data-parallel communication and optimizer. The parts add up to `end`."""

    busy: float = 0.0
    bubble: float = 0.0
    """Seconds without work, until the rank's last step."""
    exposed_messages: float = 0.0
    """Of the time without work, seconds for which a message is in transfer."""
    end: float = 0.0
    runs: dict[tuple[int, str], int] = field(default_factory=dict)
    """Number of passes by chunk and direction."""
    spans: list[tuple[float, float, Step]] = field(default_factory=list)
    """Start and end of each simulated step."""


def schedule_of(job: TrainingJob) -> Schedule:
    """The schedule of an iteration of a job."""
    parallel = job.parallel
    return Schedule(
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        microbatches=job.batch.microbatches,
        group_size=parallel.microbatch_group_size,
        legacy=is_before(job.megatron, "0.10"),
        combined=job.flags.overlap_moe_expert_parallel_comm,
    )


@lru_cache(maxsize=256)
def _orders(schedule: Schedule, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    return tuple(
        steps(
            pipeline=schedule.pipeline,
            pipeline_rank=rank,
            chunks=schedule.chunks,
            microbatches=microbatches,
            group_size=schedule.group_size,
            legacy=schedule.legacy,
            combined=schedule.combined,
        )
        for rank in range(schedule.pipeline)
    )


def simulated_microbatches(schedule: Schedule) -> int:
    """Microbatches that are simulated. In the steady state further ones take as long as on the slowest rank."""
    group = schedule.group_size or schedule.pipeline
    if schedule.pipeline == 1:
        return min(schedule.microbatches, 2)
    if schedule.microbatches <= 6 * group:
        return schedule.microbatches
    return 4 * group + schedule.microbatches % group


def simulate(schedule: Schedule, seconds: Sequence[Sequence[tuple[float, float]]], message: float) -> list[RankTime]:
    """The iteration on each pipeline rank.

    `seconds`: forward and backward of a microbatch for each rank and chunk. `message`: seconds from the end of a step until its output
    has arrived at another rank.
    """
    short = simulated_microbatches(schedule)
    ranks = _run(schedule, _orders(schedule, short), seconds, message)
    more = schedule.microbatches - short
    if more:
        each = [sum(forward + backward for forward, backward in chunks) for chunks in seconds]
        slowest = max(each)
        for rank, own in zip(ranks, each, strict=True):
            rank.busy += more * own
            rank.bubble += more * (slowest - own)
            rank.end += more * slowest
            for key in rank.runs:
                rank.runs[key] += more
    return ranks


def _run(
    schedule: Schedule, orders: Sequence[Sequence[Step]], seconds: Sequence[Sequence[tuple[float, float]]], message: float
) -> list[RankTime]:
    pipeline, last = schedule.pipeline, schedule.pipeline * schedule.chunks - 1
    ranks = [RankTime() for _ in range(pipeline)]
    position = [0] * pipeline
    done: dict[tuple[bool, int, int], float] = {}
    waiting = list(range(pipeline))
    while waiting:
        blocked, before = [], sum(position)
        for rank in waiting:
            order, time = orders[rank], ranks[rank]
            while position[rank] < len(order):
                step = order[position[rank]]
                stage = step.chunk * pipeline + rank
                forward = step.kind == "forward"
                source = _source(forward, step.microbatch, stage, last)
                if source is not None and source not in done:
                    break
                delay = message if source is not None and source[2] != stage else 0.0
                arrival = done[source] + delay if source is not None else 0.0
                wait = max(0.0, arrival - time.end)
                shown = min(wait, delay)
                duration = seconds[rank][step.chunk][0 if forward else 1]
                start = time.end + wait
                time.bubble += wait - shown
                time.exposed_messages += shown
                time.busy += duration
                time.end = start + duration
                time.spans.append((start, time.end, step))
                key = (step.chunk, step.kind)
                time.runs[key] = time.runs.get(key, 0) + 1
                done[forward, step.microbatch, stage] = time.end
                position[rank] += 1
            if position[rank] < len(order):
                blocked.append(rank)
        if sum(position) == before:
            raise AssertionError("no step of the schedule can run")
        waiting = blocked
    return ranks


def _source(forward: bool, microbatch: int, stage: int, last: int) -> tuple[bool, int, int] | None:
    """The step whose output a step needs; None for the first forward."""
    if forward:
        return (True, microbatch, stage - 1) if stage else None
    return (False, microbatch, stage + 1) if stage < last else (True, microbatch, stage)
