"""All-reduces of the amax (largest absolute value) of FP8 tensors over ranks that use the same scale.

The delayed recipe keeps amax histories. Those of all quantizers are reduced at the end of each forward pass under `fp8_autocast`,
also in a recomputation, and in the backward pass of its first layer (`FP8GlobalStateManager.reduce_and_update_fp8_tensors`). The
decoder is one such pass, and each MTP layer two: its projection and its transformer layer. With overlapped microbatches a step of
the schedule is one pass, with a forward, a backward or both.
Weights stored in FP8 are cast from shards of their fp32 master weights, so ranks first need the amax over all shards
(`cast_master_weights_to_fp8`). The amax of a tensor that is sharded over tensor-parallel ranks is reduced by its module.

Sources: Transformer Engine 2.11, pytorch/quantization.py and pytorch/tensor/utils.py; `get_fp8_context` in
megatron/core/fp8_utils.py (0.16.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Final

from analyzer.communication.calls import Call, Phase
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.experts import GROUPED_LINEAR
from analyzer.modules.norm import OPERATIONS
from analyzer.modules.quantized import scales
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.program.schedule.pipeline import warmup_forwards
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import casts_to_stored_fp8
from analyzer.states.fp8_weights import BACKWARD_QUANTIZERS, FORWARD_QUANTIZERS, matrices, quantized, quantized_gemms
from analyzer.units import ceil_div

_WITH_OUTPUT_FREED: Final = {"mla_up_proj": ModuleKind.KV_UP, "gdn_norm_out": ModuleKind.GATED_NORM}
"""Checkpoints of `--recompute-modules` that the delayed recipe can have, with the kind of a module in each."""


def amax_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """All-reduces of fp32 amax values: delayed recipe for each microbatch and chunk, stored weights once per iteration."""
    fp8 = job.precision.fp8
    gemms = quantized_gemms(stage.trees)
    if fp8 is None or not gemms:
        return
    if fp8.recipe == "delayed":
        checkpoints, layers = (sum(counts) for counts in zip(*(_checkpointed_layers(tree) for tree in stage.trees), strict=True))
        first = sum(_first_modules(tree) for tree in stage.trees)
        predicting = 2 * sum(_mtp_layers(tree) for tree in stage.trees)
        calls: tuple[tuple[Phase, int, int, int], ...] = (
            ("forward", FORWARD_QUANTIZERS, len(stage.trees) + predicting, _steps_without_forward(job, stage)),
            ("recompute", FORWARD_QUANTIZERS, checkpoints + _recomputed_outputs(job, stage), 0),
            ("backward", BACKWARD_QUANTIZERS, first + layers + predicting, 0),
        )
        for phase, quantizers, count, once in (call for call in calls if call[2]):
            yield Call(
                group="tp_dp_cp",
                kind="all_reduce",
                phase=phase,
                module="fp8.amax",
                shape=(gemms * quantizers,),
                dtype="fp32",
                per_microbatch=count,
                per_iteration=once,
            )
    if casts_to_stored_fp8(job):
        values, weights = Counter[str](), Counter[str]()
        for parameter in (each for each in quantized(stage.trees) if not each.frozen):
            group = _shard_group(job, parameter)
            values[group] += _amax_values(job, parameter)
            if fp8.recipe == "nvfp4":  # one value of each weight, too
                weights[group] += matrices(parameter)[0]
        for group, count in (*values.items(), *weights.items()):
            yield Call(
                group=group,
                kind="all_reduce",
                phase="parameter",
                module="fp8.weight_amax",
                shape=(count,),
                dtype="fp32",
                per_iteration=1,
            )


def _steps_without_forward(job: TrainingJob, stage: StageModel) -> int:
    """Number of steps of an iteration that overlap no forward with their backward; 0 without overlapped microbatches.

    `combined_forward_backward_step` enters `fp8_autocast` in these too.
    """
    if not job.flags.overlap_moe_expert_parallel_comm:
        return 0
    parallel = job.parallel
    forwards = warmup_forwards(
        pipeline=parallel.pipeline,
        pipeline_rank=stage.pipeline_rank,
        chunks=parallel.chunks,
        group_size=parallel.microbatch_group_size or parallel.pipeline,
    )
    return min(forwards + 1, job.batch.microbatches * parallel.chunks)


def _checkpointed_layers(module: Module) -> tuple[int, int]:
    """Checkpoints with FP8 GEMMs, each with its own `fp8_autocast` when it is recomputed, and the first modules in them.

    Each linear layer counts as the first of its pass, up to the first grouped layer or norm of its own, which counts too: these do
    not restore `IS_FIRST_FP8_MODULE` (pytorch/module/linear.py, module/grouped_linear.py and ops/fuser.py).
    """
    if module.recomputed and any(parameter.quantized for parameter in parameters(module)):
        first = 0
        for _, each in module.walk():
            ends = each.source == GROUPED_LINEAR or OPERATIONS in each.source
            first += ends or any(parameter.quantized for parameter in each.parameters)
            if ends:
                break
        return 1, first
    found = [_checkpointed_layers(child) for child in module.children]
    return sum(checkpoints for checkpoints, _ in found), sum(layers for _, layers in found)


def _recomputed_outputs(job: TrainingJob, stage: StageModel) -> int:
    """Number of checkpoints in layers with FP8 GEMMs whose output is freed (`CheckpointWithoutOutput`).

    They are around the up projections of latent attention, and around the output norm of gated delta nets.
    """
    if job.recompute.granularity != "selective":
        return 0
    kinds = {_WITH_OUTPUT_FREED[name] for name in job.recompute.modules if name in _WITH_OUTPUT_FREED}
    return sum(
        any(child.kind in kinds for child in each.children)
        and any(parameter.quantized for child in each.children for parameter in child.parameters)
        for tree in stage.trees
        for _, each in tree.walk()
    )


def _mtp_layers(tree: Module) -> int:
    """Number of MTP layers of a chunk outside checkpoints."""
    depths = (each for block in tree.children if block.kind is ModuleKind.MTP for each in block.children)
    return sum(not any(child.recomputed for child in depth.children) for depth in depths)


def _first_modules(tree: Module) -> int:
    """Number of modules outside checkpoints that count as the first of a pass. With checkpointed layers the final norm is one."""
    decoder = next(child for child in tree.children if child.kind is ModuleKind.DECODER)
    names = {child.name for child in decoder.children}
    outside = {child.name for child in decoder.children if not child.recomputed}
    return 1 if outside == names else len(outside)


def _shard_group(job: TrainingJob, parameter: Parameter) -> str:
    """The group over which the master weights of a parameter are sharded.

    Without expert parallelism DistributedDataParallel treats experts as dense parameters, and Megatron-FSDP does not.
    """
    apart = job.parallel.expert > 1 or job.fsdp is not None
    group = "edp" if parameter.sharding == "expert" and apart else "dp_cp"
    return f"intra_{group}" if job.parallel.distributed_optimizer_instances > 1 else group


def _amax_values(job: TrainingJob, parameter: Parameter) -> int:
    """Number of amax values of a parameter: one for each scale."""
    assert job.precision.fp8 is not None
    count, rows, columns = matrices(parameter)
    if job.precision.fp8.recipe == "nvfp4":  # tiles of 16 × 16 (`NVFP4_BLOCK_SCALING_SIZE`), whose scales are then repeated
        return count * ceil_div(rows, 16) * ceil_div(columns, 16)
    shape, _ = scales(job.precision.fp8.recipe, rows, columns, "row", square_blocks=True)
    return count * prod(shape)
