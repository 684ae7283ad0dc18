"""Model states with an optimizer such as Lion that updates one parameter after another: each update is a temporary tensor.

Source of Lion: emerging_optimizers/scalar_optimizers (`Lion.step`, `calculate_lion_update`), releases of 2026. It updates fp32
master weights of 16-bit parameters (`_get_megatron_optimizer_based_on_param_groups`, megatron/core/optimizer/__init__.py of 0.17).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.buffers.matrices import OptimizerParameter, parameters_in_creation_order
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up


def states_one_by_one(job: TrainingJob, stage: StageModel, *, parameters: int, gradients: int) -> States:
    """Model states of a rank, which updates all of its parameters."""
    # vectors are in a separate group
    listed = sorted(parameters_in_creation_order(job, stage), key=lambda weight: len(weight.shape) == 1)
    each = [(round_up(4 * weight.numel, BLOCK), weight.dtype != "fp32") for weight in listed]
    master_weights = sum(size_each for size_each, half in each if half)
    updates = largest_updates(listed)
    return States(
        parameters=parameters,
        gradients=gradients,
        master_weights=master_weights,
        moments=len(job.optimizer.state_dtypes) * sum(size_each for size_each, _ in each),
        gradient_copies=master_weights if job.precision.gradients != "fp32" else 0,
        step_workspace=updates,
        first_step_bytes=total_bytes(updates),
    )


def largest_updates(owned: Sequence[OptimizerParameter]) -> tuple[Tensor, ...]:
    """The largest pair of consecutive updates: the variable references the previous update until it is assigned again."""
    tensors = [Tensor(name="update", shape=weight.shape, dtype="fp32", formula="4·numel") for weight in owned]
    return max((tuple(tensors[:1]), *pairwise(tensors)), key=total_bytes)
