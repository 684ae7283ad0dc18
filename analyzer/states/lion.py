"""Lion: one moment for each element, and updates that are made before they are applied.

Read in emerging_optimizers/scalar_optimizers (`Lion.step`, `calculate_lion_update`), releases of 2026. It updates fp32 masters
of 16-bit parameters (`_get_megatron_optimizer_based_on_param_groups`, megatron/core/optimizer/__init__.py of 0.17).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from analyzer.buffers.matrices import OptimizerParameter, parameters_in_creation_order
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up


def lion_states(job: TrainingJob, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """States of a rank, which owns every parameter it holds."""
    held = sorted(
        parameters_in_creation_order(job, stage), key=lambda weight: len(weight.shape) == 1
    )  # vectors have a group of their own
    each = [(round_up(4 * weight.numel, BLOCK), weight.dtype != "fp32") for weight in held]
    masters = sum(size_each for size_each, half in each if half)
    updates = lion_updates(held)
    return States(
        parameters=parameters,
        gradients=gradients,
        masters=masters,
        moments=sum(size_each for size_each, _ in each),
        gradient_copies=masters if job.precision.gradients != "fp32" else 0,
        step_workspace=updates,
        first_step_bytes=total_bytes(updates),
    )


def lion_updates(owned: Sequence[OptimizerParameter]) -> tuple[Tensor, ...]:
    """The update of a parameter, and that of the one before, whose name it takes: at their largest."""
    tensors = [Tensor(name="update", shape=weight.shape, dtype="fp32", formula="4·numel") for weight in owned]
    return max((tuple(tensors[:1]), *pairwise(tensors)), key=total_bytes)
