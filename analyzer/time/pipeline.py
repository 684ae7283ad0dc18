"""Simulation of an iteration on all pipeline ranks: which step waits for which message, and for how long.

A step starts when the step before it on its rank has ended and its input has arrived: the output of the same microbatch on the
stage before, or the gradient of the stage after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.program.schedule.pipeline import Step, steps
from analyzer.specs import TrainingJob
from analyzer.units import ceil_div

MOST_STEPS: Final = 200_000
"""Steps of a simulation. Larger schedules are computed by formula."""
STEADY: Final = 1e-9
"""Share of an iteration below which a change is a rounding error."""


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
    passes: int
    """Passes of each direction through each chunk: the number of microbatches."""


class Node(NamedTuple):
    """A step in an order in which every step comes after those that it needs."""

    rank: int
    chunk: int
    direction: int
    """0 is forward, 1 is backward."""
    source: int
    """Place of the step whose output it needs; -1 for none."""
    remote: bool
    """Whether that step is on another rank."""
    microbatch: int


def schedule_of(job: TrainingJob) -> Schedule:
    """The schedule of an iteration of a job."""
    parallel = job.parallel
    return Schedule(
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        microbatches=job.batch.microbatches,
        group_size=parallel.microbatch_group_size,
        legacy=job.core.legacy_interleaving,
        combined=job.flags.overlap_moe_expert_parallel_comm,
    )


@lru_cache(maxsize=256)
def topology(schedule: Schedule, microbatches: int) -> tuple[Node, ...]:
    """The steps of all ranks, each after the step before it on its rank and after the step whose output it needs."""
    pipeline, last = schedule.pipeline, schedule.pipeline * schedule.chunks - 1
    orders = [_order(schedule, rank, microbatches) for rank in range(pipeline)]
    position = [0] * pipeline
    places: dict[tuple[bool, int, int], int] = {}
    nodes: list[Node] = []
    while len(nodes) < sum(map(len, orders)):
        before = len(nodes)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                step = order[position[rank]]
                stage, forward = step.chunk * pipeline + rank, step.kind == "forward"
                source = _source(forward, step.microbatch, stage, last)
                if source is not None and source not in places:
                    break
                place = -1 if source is None else places[source]
                remote = source is not None and source[2] % pipeline != rank
                places[forward, step.microbatch, stage] = len(nodes)
                nodes.append(Node(rank, step.chunk, 0 if forward else 1, place, remote, step.microbatch))
                position[rank] += 1
        if len(nodes) == before:
            raise AssertionError("no step of the schedule can run")
    return tuple(nodes)


def _order(schedule: Schedule, rank: int, microbatches: int) -> tuple[Step, ...]:
    return steps(
        pipeline=schedule.pipeline,
        pipeline_rank=rank,
        chunks=schedule.chunks,
        microbatches=microbatches,
        group_size=schedule.group_size,
        legacy=schedule.legacy,
        combined=schedule.combined,
    )


def _source(forward: bool, microbatch: int, stage: int, last: int) -> tuple[bool, int, int] | None:
    """The step whose output a step needs; None for the first forward."""
    if forward:
        return (True, microbatch, stage - 1) if stage else None
    return (False, microbatch, stage + 1) if stage < last else (True, microbatch, stage)


def simulated_microbatches(schedule: Schedule) -> int:
    """Microbatches that are simulated. Further groups of microbatches take as long as the last of these."""
    if schedule.pipeline == 1:
        return min(schedule.microbatches, 2)
    group = _group(schedule)
    groups = max(5, ceil_div(24, group))
    if schedule.microbatches <= (groups + 1) * group:
        return schedule.microbatches
    return groups * group + schedule.microbatches % group


def _group(schedule: Schedule) -> int:
    """Microbatches after which the steady state repeats."""
    return 1 if schedule.pipeline == 1 else schedule.group_size or schedule.pipeline


Seconds = Sequence[Sequence[tuple[float, float]]]
"""Forward and backward of a microbatch, for each rank and chunk."""


def simulate(schedule: Schedule, seconds: Seconds, message: float) -> list[RankTime]:
    """The iteration on each pipeline rank.

    `message`: seconds from the end of a step until its output has arrived at another rank. In the steady state a group of
    microbatches takes as long as on the slowest rank, and longer if messages delay the ranks in turn: 1F1B waits 2·(p - 1)/p
    messages for each microbatch if stages are equal. So the time of further groups is what the last simulated one adds.
    """
    if is_large(schedule):
        return _without_simulation(schedule, seconds, message)
    short, group = simulated_microbatches(schedule), _group(schedule)
    ranks, _ = _simulated(schedule, short, seconds, message)
    while short < schedule.microbatches:
        before, _ = _simulated(schedule, short - group, seconds, message)
        if _is_steady(before, ranks):
            return _extended(schedule, seconds, before, ranks)
        short = min(schedule.microbatches, short + group * ceil_div(short, group))
        ranks, _ = _simulated(schedule, short, seconds, message)
    return ranks


def _is_steady(before: Sequence[RankTime], after: Sequence[RankTime]) -> bool:
    """Whether a further group of microbatches shortens no time without work, which it does only before the steady state."""
    return all(
        later.bubble >= earlier.bubble - STEADY * later.end
        and later.exposed_messages >= earlier.exposed_messages - STEADY * later.end
        for earlier, later in zip(before, after, strict=True)
    )


def _extended(schedule: Schedule, seconds: Seconds, before: Sequence[RankTime], ranks: list[RankTime]) -> list[RankTime]:
    """The iteration with all microbatches. `before` has a group of microbatches less than `ranks`, and each further group adds that
    difference."""
    group = _group(schedule)
    groups = (schedule.microbatches - ranks[0].passes) / group
    slowest = group * max(map(_microbatch, seconds))
    for time, earlier, chunks in zip(ranks, before, seconds, strict=True):
        time.passes = schedule.microbatches
        time.busy = schedule.microbatches * _microbatch(chunks)
        added = time.end - earlier.end
        missing = max(0.0, slowest - added)  # the simulated groups may be too few to reach the steady state
        time.end += groups * (added + missing)
        time.exposed_messages += groups * (time.exposed_messages - earlier.exposed_messages)
        time.bubble += groups * (time.bubble - earlier.bubble + missing)
    return ranks


def _simulated(schedule: Schedule, microbatches: int, seconds: Seconds, message: float) -> tuple[list[RankTime], list[float]]:
    """An iteration of some microbatches: each rank, and the end of each step of `topology`."""
    ranks = [RankTime(passes=microbatches, busy=microbatches * _microbatch(chunks)) for chunks in seconds]
    durations = [duration for chunks in seconds for directions in chunks for duration in directions]
    ends: list[float] = []
    free = [0.0] * schedule.pipeline
    for rank, step, source, remote in _compact(schedule, microbatches):
        start = free[rank]
        if remote:
            arrival = ends[source] + message
            if arrival > start:
                shown = min(message, arrival - start)
                ranks[rank].exposed_messages += shown
                ranks[rank].bubble += arrival - start - shown
                start = arrival
        free[rank] = end = start + durations[step]  # an earlier step of the same rank has always ended
        ends.append(end)
    for time, end in zip(ranks, free, strict=True):
        time.end = end
    return ranks, ends


@lru_cache(maxsize=256)
def _compact(schedule: Schedule, microbatches: int) -> tuple[tuple[int, int, int, bool], ...]:
    """Of each step of `topology`: its rank, the place of its duration, its source, and whether that is on another rank."""
    return tuple(
        (node.rank, 2 * (node.rank * schedule.chunks + node.chunk) + node.direction, node.source, node.remote)
        for node in topology(schedule, microbatches)
    )


def _microbatch(chunks: Sequence[tuple[float, float]]) -> float:
    """Seconds of a microbatch on a rank."""
    return sum(forward + backward for forward, backward in chunks)


def is_large(schedule: Schedule) -> bool:
    """Whether a simulation would take more than `MOST_STEPS` steps."""
    return 2 * simulated_microbatches(schedule) * schedule.pipeline * schedule.chunks > MOST_STEPS


def _without_simulation(schedule: Schedule, seconds: Seconds, message: float) -> list[RankTime]:
    """The iteration by formula: the slowest rank runs all microbatches, and a first one passes the others.

    The bubble of an interleaved schedule is smaller by the number of chunks (Narayanan et al. 2021, section 2.2).
    """
    ranks = [RankTime(passes=schedule.microbatches) for _ in seconds]
    each = [_microbatch(chunks) for chunks in seconds]
    slowest = max(each)
    transfers = 2 * (schedule.pipeline - 1) * message
    end = schedule.microbatches * slowest + (sum(each) - slowest) / schedule.chunks + transfers
    for time, own in zip(ranks, each, strict=True):
        time.busy = schedule.microbatches * own
        time.end = end
        time.exposed_messages = transfers
        time.bubble = end - time.busy - transfers
    return ranks


def simulated_passes(schedule: Schedule, seconds: Seconds, message: float) -> tuple[tuple[Node, ...], list[float]]:
    """Every step of an iteration with all microbatches, and its end in seconds."""
    _, ends = _simulated(schedule, schedule.microbatches, seconds, message)
    return topology(schedule, schedule.microbatches), ends


def spans(schedule: Schedule, seconds: Seconds, message: float) -> list[tuple[Node, float, float]]:
    """Start and end of each simulated step, for a timeline; none if there are too many."""
    if is_large(schedule):
        return []
    microbatches = simulated_microbatches(schedule)
    _, ends = _simulated(schedule, microbatches, seconds, message)
    nodes = topology(schedule, microbatches)
    return [(node, end - seconds[node.rank][node.chunk][node.direction], end) for node, end in zip(nodes, ends, strict=True)]
