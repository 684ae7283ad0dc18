"""Model states with an optimizer that updates parameters in place, such as Adam or SGD: fp32 master weights and moments.

They are sharded by the distributed optimizer, or unsharded.

Sources: core/optimizer/{optimizer,distrib_optimizer}.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from analyzer.layout.data_parallel import described_replica, reduction_size
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Tensor, total_bytes
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer, shard_numel, shard_pieces
from analyzer.states.buffers.parameter_order import numel_of, trained_in_fp32, trained_numel
from analyzer.states.bytes_per_parameter import (
    FP32,
    adam_stores_master_weights,
    bytes_per_parameter,
    casts_to_stored_fp8,
    remainder_bytes,
    stores_remainders,
)
from analyzer.states.record import States
from analyzer.units import DTYPE_BYTES

_FP4_TILE: Final = 16 * 16
"""Elements of a weight in FP4 with one scale before it is cast (`NVFP4_BLOCK_SCALING_SIZE`)."""


def adam_states(job: TrainingJob, stage: StageModel, buffers: Sequence[Buffer], *, parameters: int, gradients: int) -> States:
    """Model states of one rank. `parameters` and `gradients` are the bytes of parameters and gradient buffers."""
    each = bytes_per_parameter(job)
    # parameters that stay in fp32 are their own master weights
    if job.optimizer.distributed:
        owned, in_fp32 = _owned(job, buffers), _owned(job, [each for each in buffers if each.parameter_dtype == "fp32"])
    else:
        owned, in_fp32 = (sum(map(count, stage.trees)) for count in (trained_numel, trained_in_fp32))
    of_torch = tuple(Tensor(name=name, shape=(owned,), dtype="fp32") for name in step_tensors_of_torch(job))
    updated = sorted(buffers, key=lambda buffer: buffer.group == "edp")  # the optimizer of experts is the last one
    steps = (*_casts(job, updated), *_unscaled(job, updated))
    in_norm = copies_of_frozen(job, stage)
    return States(
        parameters=parameters,
        gradients=gradients,
        master_weights=int(each.master * (owned - in_fp32)),
        moments=int(each.total_moments * owned + (FP32 - remainder_bytes(job) if adam_stores_master_weights(job) else 0) * in_fp32),
        gradient_copies=FP32 * owned if copies_gradients(job) else 0,
        step_workspace=max(
            (*of_torch, *max((step.tensors for step in steps), key=total_bytes, default=())), in_norm, key=total_bytes
        ),
        first_step_bytes=max(
            _conversion_to_fp32(job, updated),
            *(total_bytes(step.tensors) - step.later for step in steps),
            total_bytes(in_norm),
        ),
    )


def copies_of_frozen(job: TrainingJob, stage: StageModel) -> tuple[Tensor, ...]:
    """The fp32 copies of bf16 weights without master weights, which exist at the same time for `--log-params-norm`.

    Those of trained weights are the master weights (`calc_params_l2_norm`, megatron/training/utils.py, 0.16.1).
    """
    if not job.optimizer.log_params_norm or job.precision.parameters != "bf16":
        return ()
    numel = sum(numel_of(tree) - trained_numel(tree) for tree in stage.trees)
    return (Tensor(name="fp32 copies of frozen weights for their norm", shape=(numel,), dtype="fp32"),) if numel else ()


class _Step(NamedTuple):
    """The step of one of the optimizers of a rank."""

    tensors: tuple[Tensor, ...]
    """Temporary tensors at its highest instant."""
    later: int
    """Bytes of the moments that optimizers create after it in the first step."""


def _conversion_to_fp32(job: TrainingJob, buffers: Sequence[Buffer]) -> int:
    """Bytes at the peak of the creation of master weights in the first step, beyond the states that exist after it.

    Adam creates the states of one parameter after the other. It copies each parameter, and converts the copy to fp32, unless it
    stores only the remainder of a bf16 parameter. The parameters are those of the described rank, in the order of update.
    Source: `initialize_state` (transformer_engine/pytorch/optimizers/fused_adam.py, 2.11).
    """
    precision, each = job.precision.parameters, bytes_per_parameter(job)
    if not adam_stores_master_weights(job) or precision == "fp32" or stores_remainders(job):
        return 0
    temporary = DTYPE_BYTES[precision] + FP32
    copies = FP32 * len(_scaled_dtypes(job))
    peak, existing = 0.0, 0
    for of_optimizer, _ in _optimizers(job, buffers):
        pieces = _pieces(job, of_optimizer)
        for created, numel in zip(accumulate(pieces), pieces, strict=True):
            states = each.total_moments * (existing + created) + copies * (created - numel)
            peak = max(peak, states + temporary * numel)
        existing += sum(pieces)
    return max(0, int(peak - each.total_moments * existing))


def _pieces(job: TrainingJob, buffers: Sequence[Buffer]) -> list[int]:
    """Elements of each parameter, or part of one, that the described rank updates."""
    pieces: list[int] = []
    for buffer in buffers:
        ranks = reduction_size(job.parallel, buffer.group)
        pieces += shard_pieces(buffer, ranks, member=described_replica(job.parallel, buffer.group) % ranks)
    return pieces


def _largest_piece(job: TrainingJob, buffer: Buffer) -> int:
    """Elements of the largest parameter, or part of one, that any rank updates."""
    ranks = reduction_size(job.parallel, buffer.group)
    return max((min(max(bucket.sizes), bucket.numel // ranks) for bucket in buffer.buckets), default=0)


def _scaled_dtypes(job: TrainingJob) -> tuple[str, ...]:
    """The dtypes of the states that the precision-aware Adam copies to fp32: those stored otherwise, without remainders.

    If the kernels update moments in place (`EngineBehavior.updates_bf16_moments`), both are bf16. Other combinations are copied.
    """
    optimizer = job.optimizer
    if not optimizer.precision_aware:
        return ()
    master = (optimizer.main_params_dtype,) if adam_stores_master_weights(job) and job.precision.parameters != "fp32" else ()
    moments = optimizer.state_dtypes
    in_place = moments == ("bf16", "bf16") and job.engine.updates_bf16_moments
    return tuple(dtype for dtype in (*(() if in_place else moments), *master) if dtype != "fp32")


def _unscaled(job: TrainingJob, buffers: Sequence[Buffer]) -> Iterator[_Step]:
    """fp32 copies of the states that Adam does not store in fp32, of all parameters of an optimizer.

    They exist at the same time. Each is copied back after the kernel, in bf16 through a temporary tensor, which is largest on the
    rank with the largest parameter. It is assumed that all parameters of an optimizer are in one group: those without weight decay
    are few.
    Source: `step`, `get_unscaled_state` and `_apply_scale` (transformer_engine/pytorch/optimizers/fused_adam.py, 2.11).
    """
    scaled = _scaled_dtypes(job)
    if not scaled:
        return
    for of_optimizer, later in _optimizers(job, buffers):
        pieces = _pieces(job, of_optimizer)
        tensors = [Tensor(name="fp32 copies of optimizer states", shape=(len(scaled) * sum(pieces),), dtype="fp32")]
        if "bf16" in scaled:
            largest = max((_largest_piece(job, buffer) for buffer in of_optimizer), default=0)
            tensors.append(Tensor(name="copy of a state in bf16", shape=(largest,), dtype="bf16"))
        yield _Step(tuple(tensors), later)


def _casts(job: TrainingJob, buffers: Sequence[Buffer]) -> Iterator[_Step]:
    """Tensors of the cast of a rank's master weights to stored FP8 weights, after the step of each optimizer.

    All master weights of an optimizer are first cast to 16 bit. If weights need a transpose, the cast of each one creates that of
    the rank's part. mxfp8 weights are cast after their gathering, and an Adam with master weights writes FP8 itself.
    Source: `cast_master_weights_to_fp8` (transformer_engine/pytorch/tensor/utils.py, 2.11).
    """
    if not casts_to_stored_fp8(job):
        return
    from analyzer.states.fp8_weights import transposes  # for such jobs only, for a short start-up

    for of_optimizer, later in _optimizers(job, buffers):
        stored = [buffer for buffer in of_optimizer if buffer.parameter_dtype == "uint8"]
        if not stored:
            continue
        owned = _owned(job, stored)
        tensors = [Tensor(name="16-bit copies of master weights", shape=(owned,), dtype=job.precision.parameters)]
        if job.precision.fp8 is not None and job.precision.fp8.recipe == "nvfp4":
            tiles = sum(size for buffer in stored for bucket in buffer.buckets for size in bucket.sizes) // _FP4_TILE
            tensors += [Tensor(name=f"{name} of the tiles of weights", shape=(tiles,), dtype="fp32") for name in ("amax", "scales")]
        if transposes(job):
            largest = max(size for buffer in stored for bucket in buffer.buckets for size in bucket.sizes)
            tensors.append(Tensor(name="transpose of a weight in FP8", shape=(min(largest, owned),), dtype="fp8"))
        yield _Step(tuple(tensors), later)


def _optimizers(job: TrainingJob, buffers: Sequence[Buffer]) -> Iterator[tuple[tuple[Buffer, ...], int]]:
    """The buffers of each optimizer in the order of the steps, and bytes of the moments that later ones create (`_Step.later`)."""
    later = _owned(job, buffers)
    for _, of_group in groupby(buffers, key=lambda buffer: buffer.group):
        of_optimizer = tuple(of_group)
        later -= _owned(job, of_optimizer)
        yield of_optimizer, int(bytes_per_parameter(job).total_moments * later)


def _owned(job: TrainingJob, buffers: Sequence[Buffer]) -> int:
    """The elements of these buffers that one rank updates."""
    return sum(shard_numel(buffer, reduction_size(job.parallel, buffer.group)) for buffer in buffers)


def step_tensors_of_torch(job: TrainingJob) -> tuple[str, ...]:
    """Names of the fp32 tensors of all elements that the step creates, if the optimizer is torch's.

    core/optimizer/__init__.py imports the fused Adam of Transformer Engine, or else that of Apex. Fused gradient accumulation of
    Megatron's own layers needs Apex too, so a launch without it is taken to have neither.
    """
    is_torch = job.software.te is None and not job.flags.gradient_accumulation_fusion
    return job.optimizer.facts.step_tensors_of_torch if is_torch else ()


def copies_gradients(job: TrainingJob) -> bool:
    """Whether each optimizer step copies 16-bit gradients to fp32."""
    precision = job.precision
    return precision.parameters != "fp32" and precision.gradients != "fp32" and not adam_stores_master_weights(job)
