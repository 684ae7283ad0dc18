"""Bytes of parameters, gradients and optimizer states on a rank, and when they appear.

Sources: core/distributed/param_and_grad_buffer.py, core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1), and
transformer_engine/pytorch/optimizers/fused_adam.py (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.buffers import Buffer, reduction_size, shard_numel, stage_buffers
from analyzer.modules.model import parameters
from analyzer.results import StageModel
from analyzer.specs import Launch
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

REMAINDER_BYTES: Final = 2
"""TE FusedAdam keeps the low half of an fp32 master beside a bf16 parameter (store_param_remainders, TE 2.1 on)."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    masters: int
    """fp32 copies of 16-bit parameters, made with the optimizer."""
    moments: int
    """Made at the first step."""
    gradient_copies: int
    """fp32 copies of 16-bit gradients: made in the step, dropped before the next forward."""

    @property
    def before_first_step(self) -> int:
        """What is there when the first forward starts."""
        return self.parameters + self.gradients + self.masters

    @property
    def steady(self) -> int:
        """What is there when any later forward starts."""
        return self.before_first_step + self.moments


def states(launch: Launch, stage: StageModel) -> States:
    """States of one rank of a pipeline stage; with the distributed optimizer, of one with a full shard."""
    buffers = [buffer for chunk in stage_buffers(launch, stage) for buffer in chunk]
    numels = [parameter.numel for tree in stage.trees for parameter in parameters(tree)]
    optimizer = launch.optimizer
    element = int(DTYPE_BYTES[launch.precision.parameters])
    gradients = sum(round_up(dtype_bytes(buffer.gradient_dtype, buffer.numel), BLOCK) for buffer in buffers)
    own_storage = sum(round_up(element * numel, BLOCK) for numel in numels)
    if optimizer.distributed and launch.megatron != "2023":
        held = sum(round_up(dtype_bytes(buffer.parameter_dtype, buffer.numel), BLOCK) for buffer in buffers)
    else:
        held = own_storage
    owned = _owned(launch, buffers) if optimizer.distributed else sum(numels)
    masters, moments = _optimizer_bytes(launch)
    copied = launch.precision.parameters != "fp32" and launch.precision.gradients != "fp32" and not optimizer.precision_aware
    return States(
        parameters=held,
        gradients=gradients,
        masters=0 if optimizer.precision_aware else int(masters * owned),
        moments=int((moments + (masters if optimizer.precision_aware else 0)) * owned),
        gradient_copies=4 * owned if copied else 0,
    )


def _owned(launch: Launch, buffers: Sequence[Buffer]) -> int:
    """Elements whose optimizer states one rank keeps."""
    return sum(shard_numel(buffer, reduction_size(launch, buffer.group)) for buffer in buffers)


def _optimizer_bytes(launch: Launch) -> tuple[float, float]:
    """Bytes of master and of moments for each element."""
    optimizer = launch.optimizer
    masters: float = 0 if launch.precision.parameters == "fp32" else 4
    if optimizer.precision_aware:
        remainder = launch.precision.parameters == "bf16" and optimizer.main_params_dtype == "fp32"
        masters = REMAINDER_BYTES if remainder else DTYPE_BYTES[optimizer.main_params_dtype]
        return masters, DTYPE_BYTES[optimizer.exp_avg_dtype] + DTYPE_BYTES[optimizer.exp_avg_sq_dtype]
    if optimizer.name == "sgd":
        return masters, 4 if optimizer.sgd_momentum else 0
    return masters, 8
