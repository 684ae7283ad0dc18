"""Model states with PyTorch FSDP2: shards of every parameter, gradient and optimizer state.

Source: megatron/core/distributed/torch_fully_sharded_data_parallel.py, megatron/core/optimizer/optimizer.py
(`Float16OptimizerWithFloat16Params`) (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Parameter, Tensor, parameters
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp2 import is_torch_unit, split_by_expert, torch_shard_numel, unit_pieces
from analyzer.states.buffers.parameter_order import creation_order, has_weight_decay
from analyzer.states.bytes_per_parameter import FP32
from analyzer.states.record import States
from analyzer.units import BLOCK, dtype_bytes, round_up


def torch_states(job: TrainingJob, stage: StageModel) -> States:
    """Model states of one rank: everything is sharded over data- and context-parallel ranks.

    Gradients have the dtype of the parameters. The optimizer step copies them to fp32. The copies stay allocated until the next
    iteration starts.
    """
    listed = [parameter for tree in stage.trees for parameter in parameters(tree)]
    in_fp32 = sum(each.pieces * round_up(FP32 * torch_shard_numel(job, each), BLOCK) for each in listed)
    shards = sum(each.pieces * round_up(dtype_bytes(each.dtype, torch_shard_numel(job, each)), BLOCK) for each in listed)
    half = job.precision.parameters != "fp32"
    unsharded = sum(each.pieces * round_up(dtype_bytes(each.dtype, each.numel // each.pieces), BLOCK) for each in listed)
    return States(
        parameters=shards,
        gradients=shards,
        master_weights=in_fp32 if half else 0,
        moments=len(job.optimizer.state_dtypes) * in_fp32,
        gradient_copies=in_fp32 - shards if half else 0,
        at_start=unsharded,
        step_workspace=_beside_copies(job, stage, in_fp32) if half else (),
    )


class _Gradient(NamedTuple):
    """The gradient of a parameter in the optimizer step."""

    unit: int
    """Number of the unit, whose reduced gradients are one tensor."""
    bytes: int
    copy_bytes: int
    decays: bool
    """`has_weight_decay`."""


def _beside_copies(job: TrainingJob, stage: StageModel, copies: int) -> tuple[Tensor, ...]:
    """16-bit gradients that are allocated beside the fp32 copies at the highest instant of copying. `copies`: bytes of all copies.

    The reduced gradients of a unit are one tensor. It is freed after its last parameter, which is a vector in most units, so that
    nearly all copies exist before the first unit is freed (`Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads`).
    """
    gradients = sorted(_gradients(job, stage), key=lambda each: not each.decays)
    left: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for each in gradients:
        left[each.unit] = left.get(each.unit, 0) + each.bytes
        waiting[each.unit] = waiting.get(each.unit, 0) + 1
    allocated = highest = sum(round_up(size, BLOCK) for size in left.values())
    for each in gradients:
        allocated += each.copy_bytes
        highest = max(highest, allocated)
        waiting[each.unit] -= 1
        if not waiting[each.unit]:
            allocated -= round_up(left[each.unit], BLOCK)
    beside = highest - copies
    return (Tensor(name="gradients beside their fp32 copies", shape=(beside,), dtype="uint8"),) if beside > 0 else ()


def _gradients(job: TrainingJob, stage: StageModel) -> Iterator[_Gradient]:
    """The gradients of a rank in the order of the parameters. Parameters outside units belong to the root, unit 0."""
    unit = 0
    for tree in stage.trees:
        for piece in unit_pieces(job, tree):
            of_unit = is_torch_unit(job, piece)
            unit += of_unit
            for parameter in creation_order(piece):
                yield _gradient(job, unit if of_unit else 0, parameter)


def _gradient(job: TrainingJob, unit: int, parameter: Parameter) -> _Gradient:
    numel, pieces = torch_shard_numel(job, parameter), parameter.pieces
    dimensions = len(parameter.shape) - split_by_expert(parameter)
    return _Gradient(
        unit=unit,
        bytes=pieces * dtype_bytes(parameter.dtype, numel),
        copy_bytes=pieces * round_up(FP32 * numel, BLOCK),
        decays=has_weight_decay(parameter, dimensions),
    )
