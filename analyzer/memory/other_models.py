"""Models that are on the GPUs beside the trained one: weights of references and teachers, states of critics."""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.specs.fine_tuning import ALL_PARAMETERS, Phase, StatePart
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.buffers.parameter_order import sum_of_parameters
from analyzer.states.of_rank import stage_states
from analyzer.units import BLOCK, dtype_bytes, round_up


def other_weight_bytes(job: TrainingJob, phase: Phase, *, stage: int | None) -> int:
    """Bytes of the weights of the other model of a phase.

    `stage`: of the pipeline of the training; None for the stage with the fewest. Of another layout it is the one with the most.
    """
    sizes = [sum(tree.derived(weight_bytes) for tree in each.trees) for each in stage_models(job_of_phase(job, phase))]
    if phase.parallel is not None:
        return max(sizes)
    return min(sizes) if stage is None else sizes[stage]


def job_of_phase(job: TrainingJob, phase: Phase) -> TrainingJob:
    """The job with the model of a phase, if it has another one, and its layout."""
    if phase.model is None:
        return job
    return replace(job, model=phase.model, parallel=phase.parallel or job.parallel, tuning=ALL_PARAMETERS)


def states_in_turns(job: TrainingJob, other: TrainingJob, parts: frozenset[StatePart], *, stage: int | None) -> int:
    """Bytes of these states of a model that is trained in turns with that of `job`, in the job `other`.

    `stage`: of the pipeline of `job`; None for the stage with the fewest. Of another pipeline it is the one with the most.
    """
    sizes = []
    for each in stage_models(other):
        states = stage_states(other, each, stage_buffers(other, each))
        optimizer = states.steady - states.parameters - states.gradients
        of_part: dict[StatePart, int] = {
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer": optimizer,
        }
        sizes.append(sum(of_part[part] for part in parts))
    if other.parallel.pipeline != job.parallel.pipeline:
        return max(sizes)
    return min(sizes) if stage is None else sizes[stage]


def weight_bytes(tree: Module) -> int:
    """Bytes of the weights of a tree, each in an allocation of its own."""
    return sum_of_parameters(tree, lambda each: round_up(dtype_bytes(each.dtype, each.numel), BLOCK))
