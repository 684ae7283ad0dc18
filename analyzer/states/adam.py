"""Model states with Adam or SGD: fp32 master weights and moments, sharded by the distributed optimizer or unsharded.

Sources: core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.buffers.gradient_buffers import Buffer, shard_numel
from analyzer.buffers.parameter_order import numel_of
from analyzer.layout.data_parallel import reduction_size
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor
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
        step_workspace=(Tensor(name="square roots of torch's Adam", shape=(owned,), dtype="fp32"),) if uses_torch_adam(job) else (),
    )


def uses_torch_adam(job: TrainingJob) -> bool:
    """Whether Adam is torch's, whose step creates the square roots of all second moments at once (`torch._foreach_sqrt`).

    core/optimizer/__init__.py imports the fused Adam of Transformer Engine, or else that of Apex. Fused gradient accumulation of
    Megatron's own layers needs Apex too, so a launch without it is taken to have neither.
    Source: torch/optim/adam.py `_multi_tensor_adam` (2.8).
    """
    return job.optimizer.name == "adam" and job.software.te is None and not job.flags.gradient_accumulation_fusion


def copies_gradients(job: TrainingJob) -> bool:
    """Whether each optimizer step copies 16-bit gradients to fp32."""
    precision = job.precision
    return precision.parameters != "fp32" and precision.gradients != "fp32" and not adam_stores_master_weights(job)
