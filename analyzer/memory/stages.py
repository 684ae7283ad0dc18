"""The inputs of the memory computation for every pipeline stage. Stages with equal trees share them."""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.layout.groups import RankRanges
from analyzer.memory.chunk_memory import ChunkMemory, chunk_memory
from analyzer.memory.messages import received_gradient
from analyzer.memory.order import equivalent_iteration
from analyzer.memory.workspaces import Workspace, workspaces
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Tensor
from analyzer.passes.stages import fsdp_trees_of, offload_trees_of, stage_models, trees_key, without_equal
from analyzer.program.schedule.iteration import Iteration
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.buffers.parameter_order import numel_of, sum_of_parameters
from analyzer.states.of_rank import stage_states, states_by_ranks
from analyzer.states.record import States


@dataclass(frozen=True, kw_only=True)
class StageAnalysis:
    """One pipeline stage."""

    model: StageModel
    buffers: tuple[tuple[Buffer, ...], ...]
    """Gradient and parameter buffers of each chunk."""
    states: tuple[tuple[RankRanges, States], ...]
    """Ranks with equal model states, and those states."""
    workspaces: tuple[Workspace, ...]
    chunks: tuple[ChunkMemory, ...]
    first_chunks: tuple[ChunkMemory, ...]
    """In the first iteration."""
    iterations: tuple[Iteration, Iteration]
    """The steps of the first iteration and of a later one."""
    parameters: int
    parameters_routed_experts: int


@dataclass(frozen=True)
class _Shared:
    """Results that stages with the same trees share."""

    buffers: tuple[tuple[Buffer, ...], ...]
    states: States
    workspaces: tuple[Workspace, ...]
    chunks: tuple[ChunkMemory, ...]
    first_chunks: tuple[ChunkMemory, ...]
    parameters: int
    parameters_routed_experts: int


_SharedByTrees = dict[tuple[bool, tuple[int, ...]], _Shared]
"""By `analyzer.passes.stages.trees_key`."""


def analysed_stages(job: TrainingJob) -> tuple[StageAnalysis, ...]:
    """Every pipeline stage of a job, in order."""
    shared: _SharedByTrees = {}
    return tuple(_stage(job, model, shared) for model in stage_models(job))


def distinct_stages(job: TrainingJob) -> tuple[StageAnalysis, ...]:
    """The first of the pipeline stages with equal trees, in order: later ones have no more microbatches in flight."""
    shared: _SharedByTrees = {}
    return tuple(_stage(job, model, shared) for model in without_equal(stage_models(job)))


def _stage(job: TrainingJob, model: StageModel, shared: _SharedByTrees) -> StageAnalysis:
    key = trees_key(model)
    if key not in shared:
        shared[key] = _analysed(job, model)
    common = shared[key]
    return StageAnalysis(
        model=model,
        buffers=common.buffers,
        states=states_by_ranks(job, model, common.buffers, common.states),
        workspaces=common.workspaces,
        chunks=common.chunks,
        first_chunks=common.first_chunks,
        iterations=_iterations(job, model),
        parameters=common.parameters,
        parameters_routed_experts=common.parameters_routed_experts,
    )


def _analysed(job: TrainingJob, model: StageModel) -> _Shared:
    received = received_gradient(job, sender=model.pipeline_rank)
    buffers = stage_buffers(job, model)
    counts = [tree.derived(_parameter_counts) for tree in model.trees]
    gradients: list[tuple[Tensor, ...]] = [() if chunk.post_process else (received,) for chunk in model.chunks]
    trees = [offload_trees_of(job, tree, chunk) for chunk, tree in zip(model.chunks, model.trees, strict=True)]
    chunks = tuple(_chunk_memory(job, later, each) for (_, later), each in zip(trees, gradients, strict=True))
    if job.activation_offload is None:
        first_chunks = chunks
    else:
        first_chunks = tuple(_chunk_memory(job, first, each) for (first, _), each in zip(trees, gradients, strict=True))
    return _Shared(
        buffers=buffers,
        states=stage_states(job, model, buffers),
        workspaces=workspaces(job, model.trees, stage=model.pipeline_rank),
        chunks=chunks,
        first_chunks=first_chunks,
        parameters=sum(every for every, _ in counts),
        parameters_routed_experts=sum(routed for _, routed in counts),
    )


def _parameter_counts(tree: Module) -> tuple[int, int]:
    """Elements of all parameters, and of those of routed experts."""
    routed = sum_of_parameters(tree, lambda parameter: parameter.numel if parameter.sharding == "expert" else 0)
    return numel_of(tree), routed


def _chunk_memory(job: TrainingJob, tree: Module, received: tuple[Tensor, ...]) -> ChunkMemory:
    """The memory of a chunk. With FSDP it includes the unsharded parameters and gradients."""
    if job.fsdp is None:
        return tree.derived(_plain_chunk_memory, received)
    sharded, first = fsdp_trees_of(job, tree)
    return chunk_memory(sharded, received=received, first=first)


def _plain_chunk_memory(tree: Module, received: tuple[Tensor, ...]) -> ChunkMemory:
    return chunk_memory(tree, received=received)


def _iterations(job: TrainingJob, model: StageModel) -> tuple[Iteration, Iteration]:
    first, later = (
        equivalent_iteration(job, model.pipeline_rank, number, model.chunks)
        for number in (job.batch.first_microbatches, job.batch.microbatches)
    )
    return first, later
