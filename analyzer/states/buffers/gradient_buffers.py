"""Megatron's contiguous parameter and gradient buffers, and their buckets.

Source: megatron/core/distributed/param_and_grad_buffer.py (`_ParamAndGradBuffer`), distributed_data_parallel.py
(`DistributedDataParallel`) and megatron/training/training.py (`get_model`), 0.16.1; for 2023 in
megatron/model/distributed.py. Sizes are elements; the gradient buffer has `gradient_dtype`, and with the distributed
optimizer there is a parameter buffer of the same elements in `parameter_dtype`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from math import lcm
from typing import Final, NamedTuple

from analyzer.layout.data_parallel import ReductionGroup, reduction_size
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import TrainingJob
from analyzer.states.buffers.parameter_order import ParameterRun, parameter_runs
from analyzer.units import BLOCK, dtype_bytes, round_up

PARAMETER_ALIGNMENT: Final = 64
"""Elements; parameters start at 128 bytes (`_pad_start_of_param_if_needed`)."""
BUCKET_ALIGNMENT: Final = 128
"""Elements; buckets start at 256 bytes, as cuBLAS requires (`_pad_end_of_bucket_if_needed`)."""
HIGH_BUSBW_ALIGNMENT: Final = 2**16
"""Elements; the same with `--ddp-pad-buckets-for-high-nccl-busbw`."""
DEFAULT_BUCKET_SIZE: Final = 40_000_000
DEFAULT_BUCKET_SIZE_PER_RANK: Final = 1_000_000
"""Elements, times the data-parallel size with context: the default if that is more than DEFAULT_BUCKET_SIZE."""


class _Grouping(NamedTuple):
    """What decides which parameters share a buffer."""

    stores_fp8: bool
    separates_experts: bool
    fp32_gradients: bool


_Kind = tuple[ReductionGroup, str, str]
"""Reduction group, stored dtype of parameters, and dtype of gradients."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A contiguous part of a buffer, reduced by one collective."""

    numel_unpadded: int
    """Elements including the alignment of parameters, without the padding at the end."""
    numel: int
    """Elements of the message."""
    sizes: tuple[int, ...]
    """Elements of each parameter, in the order of the buffer. Grouped experts have one entry per expert."""
    alignment: int = 1
    """The start of each parameter is rounded up to a multiple of this number of elements."""

    parameter_numel: int | None = None
    """Elements of the message that gathers the parameters, if they differ from `numel`: an element of two parameters in FP4."""

    @property
    def gathered_numel(self) -> int:
        """Elements of the message that gathers the parameters."""
        return self.numel if self.parameter_numel is None else self.parameter_numel

    @property
    def placed(self) -> Iterator[tuple[int, int]]:
        """(first element, elements) of each parameter, in the order of the buffer."""
        end = 0
        for size in self.sizes:
            start = -(-end // self.alignment) * self.alignment
            yield start, size
            end = start + size


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Parameters of one chunk that share dtypes and the group over which their gradients are reduced."""

    parameter_dtype: str
    gradient_dtype: str
    group: ReductionGroup
    buckets: tuple[Bucket, ...]
    gathers_through_gradients: bool = False
    """Parameters are gathered in 16 bit through the gradient buffer and have no buffer (`--reuse-grad-buf-for-mxfp8-param-ag`)."""

    @property
    def numel(self) -> int:
        """Allocated elements."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def parameter_bytes(self) -> int:
        """Allocated bytes of the buffer of the parameters."""
        return round_up(dtype_bytes(self.parameter_dtype, sum(bucket.gathered_numel for bucket in self.buckets)), BLOCK)

    @property
    def in_4_bit(self) -> bool:
        """Whether an element has two parameters."""
        return any(bucket.parameter_numel is not None for bucket in self.buckets)

    @property
    def separate_bytes(self) -> int:
        """Bytes of the parameters where the model creates them, one by one, before the distributed optimizer moves them here."""
        halves = 2 if self.in_4_bit else 1
        counts = Counter(size // halves for bucket in self.buckets for size in bucket.sizes)
        return sum(count * round_up(dtype_bytes(self.parameter_dtype, size), BLOCK) for size, count in counts.items())


def bucket_size(job: TrainingJob, *, pipeline_rank: int, chunk: int, rank_numel: int) -> int | None:
    """Elements at which a bucket of this chunk is closed; None if each buffer is one bucket.

    `chunk`: index of the chunk on its pipeline rank. `rank_numel`: elements of the parameters of all its chunks.
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
    if not job.core.buckets_by_ranks:
        return DEFAULT_BUCKET_SIZE
    return max(DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_RANK * job.parallel.data_with_context)


def chunk_buffers(job: TrainingJob, runs: Sequence[ParameterRun], *, bucket_size: int | None) -> tuple[Buffer, ...]:
    """Buffers of a model chunk, dense ones first. `runs`: its parameters in the order of creation.

    There is one for each pair of dtypes, in the order in which the pairs first occur. With expert parallelism, expert parameters
    have separate buffers (`allreduce` False); without it they are reduced with all others. Weights that are stored in FP8 have
    uint8 buffers.
    """
    if job.megatron == "2023":
        return _legacy_buffers(job, runs)
    fp8 = job.precision.fp8
    mxfp8, nvfp4 = (fp8 is not None and fp8.recipe == recipe for recipe in ("mxfp8", "nvfp4"))
    return tuple(
        Buffer(
            parameter_dtype=job.precision.parameters if mxfp8 and stored == "uint8" else stored,
            gradient_dtype=gradient_dtype,
            group=group,
            buckets=_buckets(
                job,
                members,
                group_size=reduction_size(job.parallel, group),
                bucket_size=bucket_size,
                in_4_bit=nvfp4 and stored == "uint8",
            ),
            gathers_through_gradients=mxfp8 and stored == "uint8",
        )
        for (group, stored, gradient_dtype), members in _by_kind(_grouping(job), runs)
    )


def created_parameters(job: TrainingJob, tree: Module) -> tuple[tuple[int, int, int], ...]:
    """The trained parameters of a chunk in the order of creation: index of the buffer, elements, and the number of equal ones.

    Experts are listed separately. Cached per tree.
    """
    return tree.derived(_created_parameters, _grouping(job))


def _created_parameters(tree: Module, grouping: _Grouping) -> tuple[tuple[int, int, int], ...]:
    runs = parameter_runs(tree)
    places = {kind: index for index, (kind, _) in enumerate(_by_kind(grouping, runs))}
    created = (
        (places[_kind(grouping, each)], each.numel // each.pieces)
        for run in runs
        for _ in range(run.times)
        for each in run.parameters
        for _ in range(0 if each.frozen else each.pieces)
    )
    return tuple((index, numel, len(list(equal))) for (index, numel), equal in groupby(created))


def parameters_by_buffer(job: TrainingJob, tree: Module) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each buffer of a chunk, in the order of their creation."""
    return tuple(
        tuple(parameter for run in members for _ in range(run.times) for parameter in run.parameters)
        for _, members in _by_kind(_grouping(job), parameter_runs(tree))
    )


def _by_kind(grouping: _Grouping, runs: Sequence[ParameterRun]) -> list[tuple[_Kind, list[ParameterRun]]]:
    """Runs of trained parameters by buffer, those of dense parameters first."""
    kinds: dict[_Kind, list[ParameterRun]] = {}
    for run in runs:
        of_run: dict[_Kind, list[Parameter]] = {}
        for parameter in (each for each in run.parameters if not each.frozen):
            of_run.setdefault(_kind(grouping, parameter), []).append(parameter)
        for kind, parameters in of_run.items():
            kinds.setdefault(kind, []).append(ParameterRun(tuple(parameters), run.times))
    return sorted(kinds.items(), key=lambda kind: kind[0][0] == "edp")


def _grouping(job: TrainingJob) -> _Grouping:
    fp8 = job.precision.fp8
    return _Grouping(
        stores_fp8=fp8 is not None and fp8.stored_parameters,
        separates_experts=job.parallel.expert > 1,
        fp32_gradients=job.precision.gradients == "fp32",
    )


def _kind(grouping: _Grouping, parameter: Parameter) -> _Kind:
    expert = parameter.sharding == "expert" and grouping.separates_experts
    gradient_dtype = "fp32" if grouping.fp32_gradients else parameter.dtype
    stored = "uint8" if parameter.quantized and grouping.stores_fp8 else parameter.dtype
    return "edp" if expert else "dp_cp", stored, gradient_dtype


def shard_numel(buffer: Buffer, group_size: int) -> int:
    """Elements of the buffer that one rank of the distributed optimizer owns, including padding.

    Every bucket is split into `group_size` equal parts, so a shard has a part of every bucket.
    """
    return sum(bucket.numel // group_size for bucket in buffer.buckets)


def shard_pieces(buffer: Buffer, group_size: int, *, member: int = 0) -> list[int]:
    """Elements of each parameter, or part of one, that a rank of the group owns, in the order of the buffer.

    The distributed optimizer creates its weights and moments in this order (`_build_optimizer_group_ranges` in
    megatron/core/optimizer/distrib_optimizer.py, 0.16.1). `member`: the index of the rank in its group.
    """
    return [numel for bucket in buffer.buckets for numel in _shard(bucket, group_size, member)]


def _shard(bucket: Bucket, group_size: int, member: int) -> list[int]:
    first = bucket.numel // group_size * member
    end = first + bucket.numel // group_size
    placed = takewhile(lambda placed: placed[0] < end, bucket.placed)
    return [min(end, start + numel) - max(first, start) for start, numel in placed if start + numel > first]


def _buckets(
    job: TrainingJob, runs: Sequence[ParameterRun], *, group_size: int, bucket_size: int | None, in_4_bit: bool = False
) -> tuple[Bucket, ...]:
    """Buckets of one buffer, filled in reverse order of creation, which is about the order of the backward pass.

    Buckets start at multiples of the alignment of parameters, so positions are counted within a bucket.
    """
    distributed = job.optimizer.distributed
    builder = _BucketBuilder(
        alignment=PARAMETER_ALIGNMENT if distributed and job.core.aligns_parameters else 1,
        divisor=bucket_divisor(job, group_size) if distributed else 1,
        limit=bucket_size,
    )
    for run in reversed(runs):
        # both stages must shard the tied embedding equally, because its all-reduce follows the reduce-scatter
        if distributed and any(parameter.shared_embedding for parameter in run.parameters):
            for parameter in reversed(run.parameters):
                builder.add(_sizes((parameter,)), 1, separate=parameter.shared_embedding)
        else:
            builder.add(_sizes(run.parameters), run.times)
    builder.close()
    return tuple(_packed(job, bucket, group_size) for bucket in builder.closed) if in_4_bit else tuple(builder.closed)


def _packed(job: TrainingJob, bucket: Bucket, group_size: int) -> Bucket:
    """The bucket with the size of its parameters in FP4, two in an element, in the same order (`_compute_nvfp4_packed_layout`)."""
    halves = replace(bucket, sizes=tuple(size // 2 for size in bucket.sizes))
    end = max(start + size for start, size in halves.placed)
    return replace(bucket, parameter_numel=round_up(end, bucket_divisor(job, group_size)))


def _sizes(parameters: Sequence[Parameter]) -> list[int]:
    """Elements of each parameter or expert, in reverse order of creation."""
    return [size for each in reversed(parameters) for size in [each.numel // each.pieces] * each.pieces]


class _BucketBuilder:
    """Builds buckets from parameters that are added in order."""

    def __init__(self, *, alignment: int, divisor: int, limit: int | None) -> None:
        self.closed: list[Bucket] = []
        self._alignment = alignment
        self._divisor = divisor
        self._limit = limit
        """Elements at which a bucket is closed."""
        self._sizes: list[int] = []
        self._end = 0

    def add(self, sizes: list[int], times: int, *, separate: bool = False) -> None:
        """Add parameters of these sizes, repeated `times` times; `separate`: in a separate bucket."""
        aligned = sum(round_up(size, self._alignment) for size in sizes)
        gap = round_up(sizes[-1], self._alignment) - sizes[-1]
        if separate:
            self.close(aligned=True)
        while times:
            start = round_up(self._end, self._alignment)
            # add all repetitions at once if no bucket is closed in between
            fitting = times if self._limit is None else min(times, max(0, self._limit - 1 + gap - start) // max(1, aligned))
            if fitting:
                self._sizes += sizes * fitting
                self._end = start + fitting * aligned - gap
                times -= fitting
                continue
            for size in sizes:
                self._sizes.append(size)
                self._end = round_up(self._end, self._alignment) + size
                if self._limit is not None and self._end >= self._limit:
                    self.close()
            times -= 1
        if separate:
            self.close()

    def close(self, *, aligned: bool = False) -> None:
        """Close the bucket if it has parameters. `aligned`: include the padding before the next parameter."""
        if self._sizes:
            end = round_up(self._end, self._alignment) if aligned else self._end
            numel = round_up(end, self._divisor)
            self.closed.append(Bucket(numel_unpadded=end, numel=numel, sizes=tuple(self._sizes), alignment=self._alignment))
        self._sizes, self._end = [], 0


def bucket_divisor(job: TrainingJob, group_size: int) -> int:
    """With the distributed optimizer, buckets are padded to a multiple of this number of elements."""
    aligned = lcm(group_size, BUCKET_ALIGNMENT) if job.core.aligns_buckets else group_size
    return lcm(aligned, HIGH_BUSBW_ALIGNMENT) if job.optimizer.pad_buckets_for_high_nccl_busbw else aligned


def _legacy_buffers(job: TrainingJob, runs: Sequence[ParameterRun]) -> tuple[Buffer, ...]:
    """One buffer per gradient dtype, always padded to the data-parallel size, without buckets."""
    kinds: dict[str, list[int]] = {}
    for run in reversed(runs):
        for parameter in reversed(run.parameters * run.times):
            kinds.setdefault("fp32" if job.precision.gradients == "fp32" else parameter.dtype, []).append(parameter.numel)
    first = [parameter.dtype for run in runs for parameter in run.parameters]
    return tuple(
        Buffer(
            parameter_dtype=job.precision.parameters,
            gradient_dtype=gradient_dtype,
            group="dp_cp",
            buckets=(
                Bucket(numel_unpadded=sum(sizes), numel=round_up(sum(sizes), job.parallel.data_with_context), sizes=tuple(sizes)),
            ),
        )
        for gradient_dtype, sizes in sorted(kinds.items(), key=lambda kind: first.index(kind[0]) if kind[0] in first else 0)
    )
