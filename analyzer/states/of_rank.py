"""Choose the formulas for the model states of each rank. Optional implementations are imported only here.

Sources: core/distributed/param_and_grad_buffer.py, core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.layout.groups import RankRanges, pipeline_rank_ranges
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import Fp8Recipe, TrainingJob
from analyzer.states.adam import adam_states
from analyzer.states.buffers.gradient_buffers import Buffer
from analyzer.states.buffers.parameter_order import sum_of_parameters
from analyzer.states.record import StartPeak, States
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

StageBuffers = Sequence[Sequence[Buffer]]


def states_by_ranks(
    job: TrainingJob, stage: StageModel, buffers: StageBuffers, states: States
) -> tuple[tuple[RankRanges, States], ...]:
    """Groups of ranks of a pipeline stage with equal model states, with these states.

    `buffers` and `states` are those of the stage (`buffers.of_stage.stage_buffers`, `stage_states`). All ranks are equal unless
    full parameters are distributed over replicas (layer-wise optimizer), or some states are on the host.
    """
    muon, offload = job.optimizer.muon, job.optimizer.offload
    if muon is not None and muon.layer_wise and job.parallel.data_with_context > 1:
        from analyzer.states.layer_wise import owned_states

        return owned_states(job, stage, states)
    if offload is not None and 0 < offload.fraction < 1:
        from analyzer.states.cpu_offload import states_of_ranks

        of_ranks = states_of_ranks(job, stage, states, buffers)
        return tuple((ranks, _with_moved_parameters(job, each, buffers)) for ranks, each in of_ranks)
    return ((pipeline_rank_ranges(job.parallel, stage.pipeline_rank), states),)


def stage_states(job: TrainingJob, stage: StageModel, buffers: StageBuffers) -> States:
    """Model states of one rank of a pipeline stage; with the distributed optimizer, of a rank with a full shard.

    With a layer-wise optimizer, those of a rank that would own all parameters.
    """
    if job.fsdp is not None:
        if job.fsdp.implementation == "torch":
            from analyzer.states.fsdp_torch import torch_states

            return torch_states(job, stage)
        from analyzer.states.fsdp_megatron import sharded_states

        return sharded_states(job, stage)
    return _with_moved_parameters(job, _unsharded_states(job, stage, buffers), buffers)


def _unsharded_states(job: TrainingJob, stage: StageModel, buffers: StageBuffers) -> States:
    """The states without FSDP."""
    flat = [buffer for chunk in buffers for buffer in chunk]
    gradients = sum(_allocated(buffer.gradient_dtype, buffer) for buffer in flat)
    parameters = _parameter_bytes(job, stage, flat)
    if job.optimizer.facts.orthogonalizes:
        from analyzer.states.muon import muon_states

        return muon_states(job, stage, parameters=parameters, gradients=gradients)
    if job.optimizer.facts.updates == "one by one":
        from analyzer.states.one_by_one import states_one_by_one

        return states_one_by_one(job, stage, parameters=parameters, gradients=gradients)
    if job.optimizer.offload is not None:
        from analyzer.states.cpu_offload import offloaded_states

        return offloaded_states(job, stage, buffers, parameters=parameters, gradients=gradients)
    return adam_states(job, stage, flat, parameters=parameters, gradients=gradients)


def _with_moved_parameters(job: TrainingJob, states: States, buffers: StageBuffers) -> States:
    """The states with the peak of `DistributedDataParallel`, which moves the parameters of one chunk after the other into buffers.

    All chunks exist then. The parameters of a buffer are freed after it and its gradient buffer are created
    (`_ParamAndGradBuffer.__init__`). fp32 master weights do not exist yet.
    """
    if not job.optimizer.distributed or not job.core.parameters_in_buffers:
        return states
    flat = [buffer for chunk in buffers for buffer in chunk]
    moved = [0 if _stays(job, buffer) else buffer.separate_bytes for buffer in flat]
    own = [0 if buffer.gathers_through_gradients else buffer.parameter_bytes for buffer in flat]
    existing, left = states.parameters - sum(own), sum(moved)
    for buffer, parameters, separate in zip(flat, own, moved, strict=True):
        existing += parameters + _allocated(buffer.gradient_dtype, buffer)
        states = states.with_start(existing + left, StartPeak.BUFFERS, moved=left)
        left -= separate
    return states


def _stays(job: TrainingJob, buffer: Buffer) -> bool:
    """Whether the parameters of a buffer also keep their first allocations."""
    fp8 = job.precision.fp8
    mxfp8 = fp8 is not None and fp8.stored_parameters and fp8.recipe == "mxfp8"
    return buffer.gathers_through_gradients or (mxfp8 and job.core.keeps_16_bit_parameters)


def _allocated(dtype: str, buffer: Buffer) -> int:
    """Bytes of a buffer in this dtype."""
    return round_up(dtype_bytes(dtype, buffer.numel), BLOCK)


def _parameter_bytes(job: TrainingJob, stage: StageModel, buffers: Sequence[Buffer]) -> int:
    """Parameters are in buffers with the distributed optimizer, except in early releases, and in separate allocations otherwise."""
    fp8 = job.precision.fp8
    if not job.optimizer.distributed or not job.core.parameters_in_buffers:
        element, in_fp8 = int(DTYPE_BYTES[job.precision.parameters]), fp8 is not None and fp8.stored_parameters
        total = sum(tree.derived(_bytes_of_separate_parameters, element, in_fp8) for tree in stage.trees)
        if in_fp8:
            from analyzer.states.fp8_weights import separate_bytes

            total += separate_bytes(job, stage.trees)
        return total
    own = (buffer for buffer in buffers if not buffer.gathers_through_gradients)
    total = sum(buffer.parameter_bytes for buffer in own)
    stored = fp8.recipe if fp8 is not None and fp8.stored_parameters else None
    total += sum(tree.derived(_bytes_of_frozen_parameters, stored) for tree in stage.trees)
    if fp8 is not None:
        from analyzer.states.fp8_weights import outside_buffer_bytes

        total += outside_buffer_bytes(job, [(tree, 1) for tree in stage.trees])
    return total


def _bytes_of_separate_parameters(tree: Module, element: int, in_fp8: bool) -> int:
    """`element`: bytes of an element of those parameters that do not stay in fp32. `in_fp8`: without weights stored in FP8."""

    def size(each: Parameter) -> int:
        return 0 if in_fp8 and each.quantized else round_up(max(element, int(DTYPE_BYTES[each.dtype])) * each.numel, BLOCK)

    return sum_of_parameters(tree, size)


def _bytes_of_frozen_parameters(tree: Module, stored: Fp8Recipe | None) -> int:
    """Bytes of frozen parameters, which are in no buffer. `stored`: the recipe in which weights are stored.

    Row-wise data of weights in FP8 are counted here, and column-wise ones as those of trained weights; for mxfp8 these have both.
    """

    def size(each: Parameter) -> int:
        if not each.frozen or (stored == "mxfp8" and each.quantized):
            return 0
        dtype = "fp8" if stored is not None and each.quantized else each.dtype
        return each.pieces * round_up(dtype_bytes(dtype, each.numel // each.pieces), BLOCK)

    return sum_of_parameters(tree, size)
