"""Megatron's contiguous parameter and gradient buffers, and the buckets they are reduced in.

Read in megatron/core/distributed/param_and_grad_buffer.py (`_ParamAndGradBuffer`), distributed_data_parallel.py
(`DistributedDataParallel`) and megatron/training/training.py (`get_model`), 0.16.1; for 2023 in
megatron/model/distributed.py. Sizes are elements; the gradient buffer has `gradient_dtype`, and with the distributed
optimizer there is a parameter buffer of the same elements in `parameter_dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Final

from analyzer.buffers.parameter_order import creation_order
from analyzer.layout.data_parallel import ReductionGroup, reduction_size
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import TrainingJob
from analyzer.units import round_up

PARAMETER_ALIGNMENT: Final = 64
"""Elements; parameters start at 128 bytes (`_pad_start_of_param_if_needed`)."""
BUCKET_ALIGNMENT: Final = 128
"""Elements; buckets start at 256 bytes, which cuBLAS wants (`_pad_end_of_bucket_if_needed`)."""
HIGH_BUSBW_ALIGNMENT: Final = 2**16
"""Elements; the same with `--ddp-pad-buckets-for-high-nccl-busbw`."""
DEFAULT_BUCKET_SIZE: Final = 40_000_000
DEFAULT_BUCKET_SIZE_PER_RANK: Final = 1_000_000
"""Elements, times the data-parallel size with context: the default where that is more than DEFAULT_BUCKET_SIZE."""

_Kind = tuple[ReductionGroup, str, str]
"""Group, and types of parameters as they are stored and of gradients."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A contiguous piece of a buffer, reduced by one collective."""

    parameters: int
    """How many it holds."""
    numel_unpadded: int
    """With what aligns the parameters in it, without the padding of its end."""
    numel: int
    """Elements of the message."""
    placed: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(first element, elements) of each parameter, in the order in which they lie."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Parameters of one chunk that share dtypes and the group over which their gradients are reduced."""

    parameter_dtype: str
    gradient_dtype: str
    group: ReductionGroup
    buckets: tuple[Bucket, ...]
    gathers_through_gradients: bool = False
    """Parameters are gathered in 16 bit through the gradient buffer, and lie in none (`--reuse-grad-buf-for-mxfp8-param-ag`)."""

    @property
    def numel(self) -> int:
        """Elements that are allocated."""
        return sum(bucket.numel for bucket in self.buckets)


def bucket_size(job: TrainingJob, *, pipeline_rank: int, chunk: int, rank_numel: int) -> int | None:
    """Elements at which a bucket of this chunk closes; None where each buffer is one bucket.

    `chunk` counts the chunks of the pipeline rank from 0, `rank_numel` the parameters of all of them.
    """
    optimizer = job.optimizer
    if not optimizer.overlap_grad_reduce or optimizer.overlap_param_gather_with_optimizer_step:
        return None
    if pipeline_rank > 0 or chunk > 0:  # their communication is not on the critical path
        return None
    if optimizer.ddp_bucket_size is not None:
        return optimizer.ddp_bucket_size
    if optimizer.ddp_num_buckets is not None:
        return rank_numel // optimizer.ddp_num_buckets
    return max(DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_RANK * job.parallel.data_with_context)


def chunk_buffers(job: TrainingJob, parameters: Sequence[Parameter], *, bucket_size: int | None) -> tuple[Buffer, ...]:
    """Buffers of a model chunk whose parameters are given in the order of their creation, dense ones first.

    There is one for each pair of dtypes, in the order in which the pairs first occur. Expert parameters have buffers
    of their own with expert parallelism (`allreduce` False); without it they are reduced like all others. Weights that
    are stored in FP8 have buffers of bytes.
    """
    if job.megatron == "2023":
        return _legacy_buffers(job, parameters)
    fp8 = job.precision.fp8
    mxfp8 = fp8 is not None and fp8.recipe == "mxfp8"
    return tuple(
        Buffer(
            parameter_dtype=job.precision.parameters if mxfp8 and stored == "uint8" else stored,
            gradient_dtype=gradient_dtype,
            group=group,
            buckets=_buckets(job, members, group_size=reduction_size(job.parallel, group), bucket_size=bucket_size),
            gathers_through_gradients=mxfp8 and stored == "uint8",
        )
        for (group, stored, gradient_dtype), members in _by_kind(job, parameters)
    )


def parameters_by_buffer(job: TrainingJob, tree: Module) -> tuple[tuple[Parameter, ...], ...]:
    """What each buffer of a chunk holds, in the order of creation."""
    return tuple(tuple(members) for _, members in _by_kind(job, tuple(creation_order(tree))))


def _by_kind(job: TrainingJob, parameters: Sequence[Parameter]) -> list[tuple[_Kind, list[Parameter]]]:
    """Parameters that share a buffer; kinds of dense ones first."""
    fp8 = job.precision.fp8
    kinds: dict[_Kind, list[Parameter]] = {}
    for parameter in parameters:
        expert = parameter.sharding == "expert" and job.parallel.expert > 1
        gradient_dtype = "fp32" if job.precision.gradients == "fp32" else parameter.dtype
        stored = "uint8" if parameter.quantized and fp8 is not None and fp8.stored_parameters else parameter.dtype
        kinds.setdefault(("edp" if expert else "dp_cp", stored, gradient_dtype), []).append(parameter)
    return sorted(kinds.items(), key=lambda kind: kind[0][0] == "edp")


def shard_numel(buffer: Buffer, group_size: int) -> int:
    """Elements of the buffer that one rank of the distributed optimizer owns, padding counted in.

    Every bucket is cut into `group_size` equal pieces of its own, so a shard is spread over all buckets.
    """
    return sum(bucket.numel // group_size for bucket in buffer.buckets)


def shard_pieces(buffer: Buffer, group_size: int) -> list[int]:
    """Elements of each parameter, or part of one, that the first rank of the group owns, in the order of creation."""
    owned = []
    for bucket in reversed(buffer.buckets):
        end = bucket.numel // group_size
        owned += [min(end, start + numel) - start for start, numel in reversed(bucket.placed) if start < end]
    return owned


def _buckets(job: TrainingJob, parameters: Sequence[Parameter], *, group_size: int, bucket_size: int | None) -> tuple[Bucket, ...]:
    """Buckets of one buffer, filled in reverse order of creation, which is about the order of the backward pass.

    Buckets start at multiples of the alignment of parameters, so positions inside a bucket tell all.
    """
    distributed = job.optimizer.distributed
    alignment = PARAMETER_ALIGNMENT if distributed else 1
    divisor = bucket_divisor(job, group_size) if distributed else 1
    closed: list[Bucket] = []
    placed: list[tuple[int, int]] = []
    end = 0
    for parameter, numel in ((each, each.numel // each.pieces) for each in reversed(parameters) for _ in range(each.pieces)):
        start = round_up(end, alignment)
        # first and last stage must shard the tied embedding alike, for its all-reduce comes after the reduce-scatter
        alone = parameter.shared_embedding and distributed
        if alone and placed:
            closed.append(_bucket(placed, start, divisor))
            placed, start = [], 0
        placed.append((start, numel))
        end = start + numel
        if alone or (bucket_size is not None and end >= bucket_size):
            closed.append(_bucket(placed, end, divisor))
            placed, end = [], 0
    if placed:
        closed.append(_bucket(placed, end, divisor))
    return tuple(closed)


def _bucket(placed: Sequence[tuple[int, int]], end: int, divisor: int) -> Bucket:
    return Bucket(parameters=len(placed), numel_unpadded=end, numel=round_up(end, divisor), placed=tuple(placed))


def bucket_divisor(job: TrainingJob, group_size: int) -> int:
    """What the size of a bucket is padded to a multiple of, with the distributed optimizer."""
    aligned = lcm(group_size, BUCKET_ALIGNMENT)
    return lcm(aligned, HIGH_BUSBW_ALIGNMENT) if job.optimizer.pad_buckets_for_high_nccl_busbw else aligned


def _legacy_buffers(job: TrainingJob, parameters: Sequence[Parameter]) -> tuple[Buffer, ...]:
    """One buffer for each gradient dtype, always padded to the data-parallel size, never cut into buckets."""
    kinds: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault("fp32" if job.precision.gradients == "fp32" else parameter.dtype, []).append(parameter)
    return tuple(
        Buffer(
            parameter_dtype=job.precision.parameters,
            gradient_dtype=gradient_dtype,
            group="dp_cp",
            buckets=(_legacy_bucket(members, job.parallel.data_with_context),),
        )
        for gradient_dtype, members in kinds.items()
    )


def _legacy_bucket(parameters: Sequence[Parameter], data: int) -> Bucket:
    placed = []
    end = 0
    for parameter in reversed(parameters):
        placed.append((end, parameter.numel))
        end += parameter.numel
    return _bucket(placed, end, data)
