"""Who sends what, how often, and how many bytes: one iteration's messages of a rank of each pipeline stage.

Ranks that differ only in their tensor, context or data coordinate send alike, so a row stands for all ranks of its
pipeline stage and the cost does not depend on the size of the world or the number of microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.communication.data_parallel import data_parallel_messages
from analyzer.communication.legacy import legacy_batch_messages, legacy_scalar_messages
from analyzer.communication.pipeline import pipeline_messages
from analyzer.communication.rows import Kind, Phase, ranks_in_group, row
from analyzer.communication.training_step import (
    batch_messages,
    expert_bias_messages,
    scalar_messages,
    shared_gradient_messages,
    token_count_messages,
)
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Collective, Module
from analyzer.results import Message, MessageTotal
from analyzer.specs import TrainingJob

ONCE_PER_ITERATION = ("gradient", "parameter")
"""Phases that are not run for each microbatch."""


def messages(job: TrainingJob, ranks: Sequence[StageModel]) -> tuple[Message, ...]:
    """Rows for a rank of each stage, stage by stage, in the order of an iteration.

    What would run over a group of one rank is left out: nothing is sent.
    """
    rows = tuple(message for stage in ranks for message in _stage_messages(job, stage))
    shared = {group for group in {message.group for message in rows} if ranks_in_group(job, group) > 1}
    return tuple(message for message in rows if message.group in shared)


def totals(job: TrainingJob, rows: Sequence[Message]) -> dict[str, MessageTotal]:
    """Sums for each group that something is sent over.

    The busiest rank is the one with most bytes, then most calls. The cluster's sum has every rank that makes a call,
    so a collective counts once for each member of the group and a point-to-point message once, at its sender.
    """
    ranks_per_stage = job.parallel.world_size // job.parallel.pipeline
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for message in rows:
        stages = sums.setdefault(message.group, {})
        size, calls = stages.get(message.pipeline_rank, (0, 0))
        stages[message.pipeline_rank] = (size + message.bytes_per_iteration, calls + message.calls_per_iteration)
    result = {}
    for group, stages in sums.items():
        size, calls = max(stages.values())
        result[group] = MessageTotal(
            calls_per_iteration=calls,
            bytes_per_iteration=size,
            cluster_calls_per_iteration=ranks_per_stage * sum(calls for _, calls in stages.values()),
            cluster_bytes_per_iteration=ranks_per_stage * sum(size for size, _ in stages.values()),
        )
    return result


def _stage_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    legacy = job.megatron == "2023"
    yield from (legacy_batch_messages if legacy else batch_messages)(job, stage)
    yield from _module_messages(job, stage)
    yield from pipeline_messages(job, stage)
    yield from data_parallel_messages(job, stage)
    if job.precision.fp8 is not None:
        from analyzer.communication.amax import largest_value_messages  # a millisecond that most launches need not spend

        yield from largest_value_messages(job, stage)
    yield from shared_gradient_messages(job, stage)
    if legacy:
        yield from legacy_scalar_messages(job, stage)
    else:
        yield from expert_bias_messages(job, stage)
        yield from token_count_messages(job, stage)
        yield from scalar_messages(job, stage)


def _module_messages(job: TrainingJob, stage: StageModel) -> Iterator[Message]:
    """What the modules of the stage issue; equal calls of equal layers, also of other chunks, make one row."""
    counts: Counter[tuple[str, Kind, str, tuple[int, ...], str, Phase]] = Counter()
    for tree in stage.trees:
        for path, call in _calls(tree, path="", again=False):
            counts[_table_name(path), call.kind, call.group, call.shape, call.dtype, call.phase] += call.count
    for (name, kind, group, shape, dtype, phase), calls in counts.items():
        once = phase in ONCE_PER_ITERATION
        yield row(
            job,
            pipeline_rank=stage.pipeline_rank,
            group=group,
            kind=kind,
            phase=phase,
            module=name,
            shape=shape,
            dtype=dtype,
            per_microbatch=0 if once else calls,
            per_iteration=calls if once else 0,
        )


def _calls(module: Module, *, path: str, again: bool) -> Iterator[tuple[str, Collective]]:
    """Every call with its module's path. Below a checkpoint (`again`) those of the forward are made once more in backward.

    Losses of routers are computed where gradients are recorded (`TopKRouter.routing`), so then in backward alone.
    """
    here = f"{path}.{module.name}" if path else module.name
    for call in module.collectives:
        if not (again and module.name == "router"):
            yield here, call
        if again and call.phase == "forward":
            yield here, replace(call, phase="recompute")
    for child in module.children:
        yield from _calls(child, path=here, again=again or module.recomputed)


def _table_name(path: str) -> str:
    """The path of a module without the root of its tree and without layer numbers."""
    root, *parts = path.split(".")
    return ".".join(part for part in parts if not part.isdigit()) or root
