"""The memory of a pipeline stage over an iteration: at the peak of each step of the schedule, and after it."""

from __future__ import annotations

from typing import NamedTuple

from analyzer.memory.iteration import step_bytes
from analyzer.memory.order import iteration_of
from analyzer.memory.ranks import contexts
from analyzer.memory.stages import StageAnalysis
from analyzer.program.schedule.pipeline import Step
from analyzer.specs import TrainingJob


class StepMemory(NamedTuple):
    """A forward or a backward of the schedule. Sizes are in bytes."""

    step: Step
    peak: int
    """Allocated bytes at the peak of the step."""
    after: int
    """Allocated bytes after the step: model states, workspaces and what the microbatches in flight have saved."""


def memory_over_iteration(job: TrainingJob, stage: StageAnalysis) -> tuple[StepMemory, ...]:
    """The memory of the ranks of a stage at each step of an iteration after the first, as sums of tensors.

    The blocks of the allocator can be larger than their tensors. CUDA graphs are not considered.
    """
    model = stage.model
    iteration = iteration_of(job, model.pipeline_rank, job.batch.microbatches, model.chunks)
    _, states = stage.states[0]
    base = states.steady + sum(tree.lingering_once for tree in model.trees)
    _, context = contexts(job, stage, iteration)
    found = step_bytes(iteration, stage.chunks, context=context, workspaces=stage.workspaces)
    return tuple(StepMemory(step, base + peak, base + after) for step, (peak, after) in zip(iteration.order, found, strict=True))
