"""The optimizer step and the work around it: bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.states.buffers.parameter_order import sum_of_parameters
from analyzer.states.bytes_per_parameter import bytes_per_parameter
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.pass_work import chunk_work
from analyzer.units import DTYPE_BYTES

_HOST_LINK = 25e9
"""Bytes per second between GPU and host in one direction: PCIe 4.0 with 16 lanes. Used for offloaded optimizers."""


def optimizer_seconds(job: TrainingJob, stage: StageModel, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of a rank of a stage outside the passes: gradients are cleared, scaled and checked, and parameters updated.

    Weights are also quantized here: once for each iteration.
    """
    dense = sum(tree.derived(_dense) for tree in stage.trees)
    experts = sum(tree.derived(_experts) for tree in stage.trees)
    casts = sum(chunk_work(job, tree).cast_bytes for tree in stage.trees)
    return seconds_of_parameters(job, dense, experts, speed, rates, cast_bytes=casts)


def seconds_of_parameters(
    job: TrainingJob, dense: int, experts: int, speed: SpeedSpec, rates: Efficiencies, *, cast_bytes: float = 0.0
) -> float:
    """The same from the elements of the parameters of a rank. `cast_bytes`: bytes moved to quantize weights."""
    sharded = job.optimizer.distributed or job.fsdp is not None
    parallel = job.parallel
    owned = dense / (parallel.data_with_context if sharded else 1) + experts / (parallel.expert_data if sharded else 1)
    states = bytes_per_parameter(job)
    gradient = DTYPE_BYTES[job.precision.gradients]
    each = 2 * (states.master + states.total_moments) + DTYPE_BYTES[job.precision.parameters] + 2 * gradient
    norm = gradient if job.optimizer.clip_grad else 0.0
    moved = owned * (each + norm) + (dense + experts) * gradient * _gradient_passes(job)
    seconds = (moved + cast_bytes) / (speed.hbm_bytes * rates.memory)
    if job.optimizer.offload is not None:  # gradients go to the host, and parameters come back
        seconds += job.optimizer.offload.fraction * owned * (gradient + DTYPE_BYTES[job.precision.parameters]) / _HOST_LINK
    return seconds


def _gradient_passes(job: TrainingJob) -> int:
    """How often each gradient of a rank is read or written outside the passes and the optimizer.

    They are set to zero, checked for NaN, and scaled by the size of the data-parallel group before the reduction, which reads and
    writes them. Sources: `check_grads` and `start_grad_sync` of core/distributed/param_and_grad_buffer.py, and
    `gradient_scaling_factor` of distributed_data_parallel.py (0.16.1).
    """
    if job.fsdp is not None:
        return 1
    scaled = job.parallel.data_with_context > 1 and not (job.optimizer.average_in_collective or job.flags.calculate_per_token_loss)
    return 1 + (2 if scaled else 0) + (1 if job.flags.check_for_nan_in_loss_and_grad else 0)


def _dense(tree: Module) -> int:
    return sum_of_parameters(tree, lambda each: 0 if each.frozen or each.sharding == "expert" else each.numel)


def _experts(tree: Module) -> int:
    return sum_of_parameters(tree, lambda each: each.numel if each.sharding == "expert" and not each.frozen else 0)


def slowest(job: TrainingJob, stages: Sequence[StageModel], speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of the slowest stage: all ranks wait for it."""
    return max(optimizer_seconds(job, stage, speed, rates) for stage in stages)
