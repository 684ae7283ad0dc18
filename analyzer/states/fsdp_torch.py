"""Model states with PyTorch FSDP2: shards of every parameter, gradient and optimizer state.

Source: megatron/core/distributed/torch_fully_sharded_data_parallel.py, megatron/core/optimizer/optimizer.py
(`Float16OptimizerWithFloat16Params`) (0.16.1).
"""

from __future__ import annotations

from analyzer.buffers.fsdp2 import torch_shard_numel
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import parameters
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import FP32, fp32_moments
from analyzer.states.record import States
from analyzer.units import BLOCK, dtype_bytes, round_up


def torch_states(job: TrainingJob, stage: StageModel) -> States:
    """Model states of one rank: everything is sharded over data- and context-parallel ranks.

    Gradients have the dtype of the parameters. The optimizer step copies them to fp32 and frees them. The copies stay
    allocated until the next iteration starts.
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
        moments=len(fp32_moments(job)) * in_fp32,
        gradient_copies=in_fp32 - shards if half else 0,
        at_start=unsharded,
    )
