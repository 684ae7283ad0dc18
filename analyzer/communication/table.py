"""The communication table: the collectives and messages of one iteration, for a rank of each pipeline stage.

Ranks that differ only in their tensor, context or data coordinate make the same calls. So a row stands for all ranks of its
pipeline stage, and the cost does not depend on the world size or the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from analyzer.communication.calls import Call
from analyzer.communication.data_parallel import data_parallel_calls
from analyzer.communication.legacy import legacy_batch_calls, legacy_scalar_calls
from analyzer.communication.modules import module_calls
from analyzer.communication.pipeline import pipeline_calls
from analyzer.communication.training_step import (
    batch_calls,
    expert_bias_calls,
    loss_calls,
    scalar_calls,
    shared_gradient_calls,
    token_count_calls,
)
from analyzer.layout.job_groups import ranks_in_group
from analyzer.modules.stage import StageModel
from analyzer.results import CommunicationRow, CommunicationTotal
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.units import dtype_bytes

Buffers = Sequence[Sequence[Buffer]]
"""Gradient and parameter buffers of each chunk of a stage."""


def communication_rows(
    job: TrainingJob, stages: Sequence[StageModel], buffers: Sequence[Buffers] | None = None
) -> tuple[CommunicationRow, ...]:
    """Rows for a rank of each stage, stage by stage, in the order of an iteration.

    `buffers` are those of each stage, if they are known. Calls over a group of one rank are left out.
    """
    buffers = buffers if buffers is not None else [stage_buffers(job, stage) for stage in stages]
    found = [(stage, call) for stage, held in zip(stages, buffers, strict=True) for call in _stage_calls(job, stage, held)]
    groups = {call.group for _, call in found}
    shared = {group for group in groups if ranks_in_group(job, group) > 1}
    return tuple(_row(job, stage, call) for stage, call in found if call.group in shared)


def _row(job: TrainingJob, stage: StageModel, call: Call) -> CommunicationRow:
    message_bytes = dtype_bytes(call.dtype, prod(call.shape))
    calls = call.per_microbatch * job.batch.microbatches + call.per_iteration
    return CommunicationRow(
        group=call.group,
        kind=call.kind,
        phase=call.phase,
        module=call.module,
        pipeline_rank=stage.pipeline_rank,
        shape=call.shape,
        dtype=call.dtype,
        message_bytes=message_bytes,
        calls_per_microbatch=call.per_microbatch,
        calls_per_iteration=calls,
        bytes_per_iteration=calls * message_bytes,
        peer=call.peer or None,
        batched=call.batched,
    )


def totals(job: TrainingJob, rows: Sequence[CommunicationRow]) -> dict[str, CommunicationTotal]:
    """Sums for each group with calls.

    The busiest rank is the one with most bytes, then most calls. The sum over the cluster counts every rank that makes a call: a
    collective once for each member of the group, a point-to-point message once, at its sender.
    """
    ranks_per_stage = job.parallel.world_size // job.parallel.pipeline
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for row in rows:
        stages = sums.setdefault(row.group, {})
        size, calls = stages.get(row.pipeline_rank, (0, 0))
        stages[row.pipeline_rank] = (size + row.bytes_per_iteration, calls + row.calls_per_iteration)
    result = {}
    for group, stages in sums.items():
        size, calls = max(stages.values())
        result[group] = CommunicationTotal(
            calls_per_iteration=calls,
            bytes_per_iteration=size,
            cluster_calls_per_iteration=ranks_per_stage * sum(calls for _, calls in stages.values()),
            cluster_bytes_per_iteration=ranks_per_stage * sum(size for size, _ in stages.values()),
        )
    return result


def _stage_calls(job: TrainingJob, stage: StageModel, buffers: Buffers) -> Iterator[Call]:
    legacy = job.megatron == "2023"
    yield from (legacy_batch_calls if legacy else batch_calls)(job, stage)
    yield from module_calls(stage)
    yield from pipeline_calls(job, stage)
    if job.fsdp is None:
        yield from data_parallel_calls(job, stage.pipeline_rank, buffers)
    yield from _optional_calls(job, stage)
    yield from shared_gradient_calls(job, stage)
    if legacy:
        yield from legacy_scalar_calls(job, stage)
    else:
        yield from expert_bias_calls(job, stage)
        yield from loss_calls(job, stage)
        yield from token_count_calls(job)
        yield from scalar_calls(job, stage)


def _optional_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Calls of features that most jobs do not have. Their modules are imported here only, for a short start-up."""
    if job.fsdp is not None:
        from analyzer.communication.fsdp import fsdp_calls

        yield from fsdp_calls(job, stage)
    elif job.optimizer.facts.orthogonalizes:
        from analyzer.communication.muon import muon_calls

        yield from muon_calls(job, stage)
    if job.precision.fp8 is not None:
        from analyzer.communication.amax import amax_calls

        yield from amax_calls(job, stage)
