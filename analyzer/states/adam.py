"""Model states with Adam or SGD: fp32 master weights and moments, sharded by the distributed optimizer or unsharded.

Sources: core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.buffers.gradient_buffers import Buffer, shard_numel
from analyzer.buffers.parameter_order import numel_of
from analyzer.layout.data_parallel import reduction_size
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import FP32, adam_stores_master_weights, bytes_per_parameter
from analyzer.states.record import States


def adam_states(job: TrainingJob, stage: StageModel, buffers: Sequence[Buffer], *, parameters: int, gradients: int) -> States:
    """Model states of one rank. `parameters` and `gradients` are the bytes of parameters and gradient buffers."""
    if job.optimizer.distributed:
        owned = sum(shard_numel(buffer, reduction_size(job.parallel, buffer.group)) for buffer in buffers)
    else:
        owned = sum(numel_of(tree) for tree in stage.trees)
    each = bytes_per_parameter(job)
    return States(
        parameters=parameters,
        gradients=gradients,
        master_weights=int(each.master * owned),
        moments=int(each.total_moments * owned),
        gradient_copies=FP32 * owned if copies_gradients(job) else 0,
    )


def copies_gradients(job: TrainingJob) -> bool:
    """Whether each optimizer step copies 16-bit gradients to fp32."""
    precision = job.precision
    return precision.parameters != "fp32" and precision.gradients != "fp32" and not adam_stores_master_weights(job)
