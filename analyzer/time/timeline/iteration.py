"""An iteration on every pipeline stage as events with times: passes, their modules, messages and memory.

One rank stands for all ranks of its stage. Times are those of the time model: the passes are simulated with all microbatches, so
that the last event ends when the iteration does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.memory.over_iteration import StepMemory, memory_over_iteration
from analyzer.memory.stages import analysed_stages
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.iteration import IterationTime
from analyzer.time.pipeline import Node, schedule_of, simulated_passes
from analyzer.time.timeline.passes import Direction, PassEvent, pass_events

DIRECTIONS: Final[tuple[Direction, Direction]] = ("forward", "backward")
MOST_PASSES: Final = 100_000
"""Passes of a timeline."""
MOST_EVENTS: Final = 60_000
"""Modules and messages of a timeline: about 10 MB. The passes of further microbatches have none."""


class Pass(NamedTuple):
    """The forward or the backward of a microbatch through a chunk. Times are in seconds from the start of the iteration."""

    stage: int
    chunk: int
    direction: Direction
    microbatch: int
    start: float
    end: float
    source: int
    """Place of the pass on another stage whose output it needs; -1 for none."""
    events: tuple[PassEvent, ...]
    """Modules and messages, from the start of the pass; empty if they are left out."""


class Span(NamedTuple):
    """Something else that takes time on a stage."""

    stage: int
    name: str
    stream: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """An iteration."""

    seconds: float
    stages: tuple[str, ...]
    """The name of each stage: its ranks."""
    passes: tuple[Pass, ...]
    spans: tuple[Span, ...]
    memory: tuple[tuple[StepMemory, ...], ...]
    """For each stage, the memory of its passes, in their order; empty if it is not known."""
    detailed_microbatches: int
    """Microbatches whose passes have events."""


def iteration_timeline(job: TrainingJob, time: IterationTime, speed: SpeedSpec, rates: Efficiencies) -> Timeline:
    """The timeline of an iteration of `time`. Raises InputError if the iteration has more than `MOST_PASSES` passes."""
    parallel = job.parallel
    count = 2 * job.batch.microbatches * parallel.pipeline * parallel.chunks
    if count > MOST_PASSES:
        fault = f"the iteration has {count:,} passes, and a timeline has at most {MOST_PASSES:,}"
        raise InputError("--info-timeline", fault, "use a smaller --global-batch-size")
    nodes, ends = simulated_passes(schedule_of(job), time.pass_totals, time.message)
    stages = analysed_stages(job)
    events = [
        [
            tuple(
                pass_events(job, tree, chunk.layers, direction, speed, rates, total=total)
                for direction, total in zip(DIRECTIONS, totals, strict=True)
            )
            for tree, chunk, totals in zip(stage.model.trees, stage.model.chunks, of_rank, strict=True)
        ]
        for stage, of_rank in zip(stages, time.pass_totals, strict=True)
    ]
    each = sum(len(found) for chunks in events for both in chunks for found in both)
    detailed = max(1, MOST_EVENTS // max(1, each))
    totals = time.pass_totals
    passes = tuple(
        Pass(
            node.rank,
            node.chunk,
            DIRECTIONS[node.direction],
            node.microbatch,
            end - totals[node.rank][node.chunk][node.direction],
            end,
            node.source if node.remote else -1,
            events[node.rank][node.chunk][node.direction] if node.microbatch < detailed else (),
        )
        for node, end in zip(nodes, ends, strict=True)
    )
    return Timeline(
        seconds=time.seconds,
        stages=tuple(_name(job, stage.model.pipeline_rank) for stage in stages),
        passes=passes,
        spans=tuple(_spans(time, passes, nodes)),
        memory=() if job.graphs is not None else tuple(memory_over_iteration(job, stage) for stage in stages),
        detailed_microbatches=min(detailed, job.batch.microbatches),
    )


def _name(job: TrainingJob, rank: int) -> str:
    size = job.parallel.world_size // job.parallel.pipeline
    return f"stage {rank}: {size:,} {'rank' if size == 1 else 'ranks'}"


def _spans(time: IterationTime, passes: Sequence[Pass], nodes: Sequence[Node]) -> list[Span]:
    """Messages between stages and data-parallel ranks, and what follows the passes of all stages."""
    found = []
    for node, each in zip(nodes, passes, strict=True):
        if node.remote:
            sent = passes[node.source].end
            name = f"{each.direction} {each.microbatch} to stage {each.stage}"
            found.append(Span(passes[node.source].stage, name, f"send {each.direction}", sent, sent + time.message))
    update = time.seconds - time.parts["optimizer"] - time.host_of_iteration
    ends = [max(each.end for each in passes if each.stage == stage) for stage in range(len(time.ranks))]
    for stage, (traffic, shown, end) in enumerate(zip(time.traffic, time.exposed_dp, ends, strict=True)):
        for name, messages in (("reduce gradients", traffic.gradients), ("gather parameters", traffic.parameters)):
            start = max(0.0, min(end + shown, update) - messages.seconds) if name.startswith("reduce") else 0.0
            found.append(Span(stage, name, f"data parallel: {name}", start, start + messages.seconds))
        found.append(Span(stage, "data-parallel communication that is not hidden", "compute", end, min(end + shown, update)))
        found.append(Span(stage, "optimizer step", "compute", update, update + time.parts["optimizer"]))
        found.append(Span(stage, "host, between iterations", "compute", time.seconds - time.host_of_iteration, time.seconds))
    return [span for span in found if span.end > span.start]
