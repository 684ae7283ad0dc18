"""The time of an iteration: passes of all stages, their schedule, data-parallel communication and the optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from analyzer.communication.pipeline import hidden_states_shape
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.passes.stages import first_of_equal
from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.data_parallel import StageTraffic, Traffic, exposed, stage_traffic
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.links import span_of
from analyzer.time.message_seconds import message_seconds
from analyzer.time.optimizer_seconds import slowest
from analyzer.time.pass_seconds import PassSeconds, pair_seconds, pass_run
from analyzer.time.pass_work import chunk_work
from analyzer.time.pipeline import RankTime, schedule_of, simulate
from analyzer.units import dtype_bytes

PARTS = (
    "gemm",
    "attention",
    "memory_bound",
    "exposed_tp",
    "exposed_cp",
    "exposed_ep",
    "exposed_pp",
    "exposed_dp",
    "bubble",
    "optimizer",
    "host",
)
"""The parts of an iteration. They add up to its time."""


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The time of an iteration."""

    seconds: float
    pipeline_rank: int
    """The pipeline rank that finishes last. The parts are those of its ranks."""
    parts: dict[str, float]
    """Seconds of each of `PARTS`."""
    ranks: tuple[RankTime, ...]
    """The passes of each pipeline rank."""
    passes: tuple[tuple[tuple[PassSeconds, PassSeconds], ...], ...]
    """Forward and backward of a microbatch, for each rank and chunk."""
    message: float
    """Seconds of a message between two pipeline stages."""
    traffic: tuple[StageTraffic, ...] = ()
    """Data-parallel messages of each pipeline rank."""
    exposed_dp: tuple[float, ...] = ()
    """Seconds that these add to the iteration of each pipeline rank."""
    exposed_gather: tuple[float, ...] = ()
    """Of `exposed_dp`, seconds of the gather of parameters; 0 for fully sharded parameters."""
    host_of_iteration: float = 0.0
    """Seconds of the host between iterations, a part of `host`."""

    @property
    def pass_totals(self) -> list[list[tuple[float, float]]]:
        """Seconds of forward and backward, for each rank and chunk."""
        return [[(forward.total, backward.total) for forward, backward in chunks] for chunks in self.passes]

    @property
    def microbatch_seconds(self) -> float:
        """Seconds that one more microbatch takes: forward and backward on the slowest rank."""
        return max(sum(forward.total + backward.total for forward, backward in chunks) for chunks in self.passes)


def iteration_time(
    job: TrainingJob, stages: Sequence[StageModel], rows: Sequence[CommunicationRow], speed: SpeedSpec, rates: Efficiencies
) -> IterationTime:
    """The time of an iteration. `stages` are all pipeline stages, and `rows` the communication table of `first_of_equal` stages."""
    passes = _passes(job, stages, speed, rates)
    totals = [[(forward.total, backward.total) for forward, backward in chunks] for chunks in passes]
    message = message_between_stages(job, speed, rates)
    ranks = simulate(schedule_of(job), totals, message)
    by_stage: dict[int, list[CommunicationRow]] = defaultdict(list)
    for row in rows:
        by_stage[row.pipeline_rank].append(row)
    firsts = first_of_equal(stages)
    of_rank = {rank: stage_traffic(job, by_stage[rank], speed, rates) for rank in {stage.pipeline_rank for stage in firsts}}
    traffic = [of_rank[stage.pipeline_rank] for stage in firsts]
    halves = [_exposed(job, each, chunks, rank, rates) for each, chunks, rank in zip(traffic, totals, ranks, strict=True)]
    shown = [sum(each) for each in halves]
    last = max(range(len(ranks)), key=lambda each: ranks[each].end + shown[each])
    parts = _parts(passes[last], ranks[last])
    parts["exposed_dp"] = shown[last] + max(each.scalars for each in traffic)
    parts["optimizer"] = slowest(job, stages, speed, rates)
    parts["host"] += rates.iteration
    return IterationTime(
        seconds=sum(parts.values()),
        pipeline_rank=last,
        parts=parts,
        ranks=tuple(ranks),
        passes=tuple(map(tuple, passes)),
        message=message,
        traffic=tuple(traffic),
        exposed_dp=tuple(shown),
        exposed_gather=tuple(gather for _, gather in halves),
        host_of_iteration=rates.iteration,
    )


def _passes(
    job: TrainingJob, stages: Sequence[StageModel], speed: SpeedSpec, rates: Efficiencies
) -> list[list[tuple[PassSeconds, PassSeconds]]]:
    """Forward and backward for each rank and chunk. Equal trees are computed once."""
    known: dict[int, tuple[PassSeconds, PassSeconds]] = {}

    def of(tree: Module) -> tuple[PassSeconds, PassSeconds]:
        if id(tree) not in known:
            work = chunk_work(job, tree)
            forward, backward = (pass_run(job, half, speed, rates) for half in (work.forward, work.backward))
            known[id(tree)] = pair_seconds(forward, backward, rates)
        return known[id(tree)]

    return [[of(tree) for tree in stage.trees] for stage in stages]


def message_between_stages(job: TrainingJob, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds by which the message between two pipeline stages delays the receiver."""
    if job.parallel.pipeline == 1:
        return 0.0
    payload = dtype_bytes(job.precision.parameters, prod(hidden_states_shape(job)))
    span = span_of(job, "pp", speed)
    neighbours = span if span.near >= span.ranks else span._replace(near=1)
    cost = message_seconds("send", payload, neighbours, speed, rates)
    share = rates.p2p_exposed if job.parallel.overlap_p2p and job.parallel.chunks > 1 else 1.0
    return cost.transfer * share + cost.latency


def _exposed(
    job: TrainingJob, traffic: StageTraffic, chunks: Sequence[tuple[float, float]], rank: RankTime, rates: Efficiencies
) -> tuple[float, float]:
    """Seconds that data-parallel messages add to an iteration of a rank: those of gradients, and those of parameters.

    With fully sharded parameters all are in the first.
    """
    optimizer = job.optimizer
    forward, backward = (_hiding_window(job, [each[direction] for each in chunks]) for direction in (0, 1))
    if job.fsdp is not None:
        every = traffic.every_microbatch
        both = Traffic(every.seconds + traffic.gradients.seconds + traffic.parameters.seconds, max(1, every.calls))
        return exposed(both, rank.busy, rates, overlapped=True), 0.0
    return (
        exposed(traffic.gradients, backward, rates, overlapped=optimizer.overlap_grad_reduce),
        exposed(traffic.parameters, forward, rates, overlapped=optimizer.overlap_param_gather),
    )


def _hiding_window(job: TrainingJob, seconds: Sequence[float]) -> float:
    """Seconds of passes between the first and the last gradient that is complete, or parameter that is needed.

    `seconds`: a pass of one microbatch through each chunk. With one chunk it is the pass of the last (first) microbatch.
    Interleaved schedules run a group of microbatches through a chunk before the next chunk, so that the messages of a chunk have
    the passes of the group through all others. Source: `get_schedule_table` of core/pipeline_parallel/schedules.py (0.16.1).
    """
    group = min(job.parallel.microbatch_group_size or job.parallel.pipeline, job.batch.microbatches)
    chunks = len(seconds)
    return sum(seconds) * (1 + (group - 1) * (chunks - 1) / chunks)


def _parts(chunks: Sequence[tuple[PassSeconds, PassSeconds]], rank: RankTime) -> dict[str, float]:
    """The parts of the passes of a rank."""
    total = PassSeconds()
    for forward, backward in chunks:
        total = total.plus(forward, rank.passes).plus(backward, rank.passes)
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {
        "gemm": total.gemm,
        "attention": total.attention,
        "memory_bound": total.memory_bound,
        "exposed_tp": total.tp,
        "exposed_cp": total.cp,
        "exposed_ep": total.ep,
        "host": total.host,
        "exposed_pp": rank.exposed_messages,
        "bubble": rank.bubble,
    }
    return parts
