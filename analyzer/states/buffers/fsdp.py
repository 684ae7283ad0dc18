"""Buckets of Megatron-FSDP: which parameters are gathered and reduced together, and how they are padded.

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (`_get_parameter_groups`,
`build_data_parallel_buffer_index`) and mcore_fsdp_adapter.py, 0.16.1. Sizes are elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm, prod

from analyzer.layout.data_parallel import ReductionGroup, described_replica, reduction_size
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import FsdpSpec, TrainingJob
from analyzer.states.buffers.gradient_buffers import DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_RANK
from analyzer.states.buffers.parameter_order import creation_order
from analyzer.units import round_up

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ShardedBucket:
    """Parameters of one unit, or outside units, in one flat buffer."""

    unit: int | None
    """Number of the unit in its chunk; None outside units."""
    expert: bool
    """Whether it contains routed experts, which never share a bucket with other parameters."""
    group: ReductionGroup
    """Ranks that share the bucket: the data-parallel ranks of the dense model or of experts."""
    dtype: str
    """Element type in which the parameters are stored and gathered."""
    numel: int
    """Elements of each message, including padding."""
    parameters: tuple[Parameter, ...]
    places: tuple[int, ...]
    """For each parameter, the index of the segment of the chunk that uses it (`segments`)."""
    segments: frozenset[int]
    """Indices of the segments of the chunk that use its parameters (`segments`)."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a chunk that uses a fixed set of parameters: a module without children, a layer, or layers under one checkpoint."""

    modules: tuple[Module, ...]
    units: bool
    """Whether its modules are FSDP units."""


def fsdp_of(job: TrainingJob) -> FsdpSpec:
    """The FSDP settings of a job that uses FSDP."""
    assert job.fsdp is not None
    return job.fsdp


def is_unit(module: Module) -> bool:
    """Whether this module is an FSDP unit with `--data-parallel-sharding-strategy optim_grads_params`: its parameters are
    gathered before it runs and freed after it."""
    return module.kind is ModuleKind.LAYER and module.fsdp_unit


def layers_under_checkpoint(module: Module) -> bool:
    """Whether this is a checkpoint around units."""
    return module.recomputed and all(is_unit(child) for child in module.children)


def covers_units(module: Module) -> bool:
    """Whether this is a checkpoint around several units."""
    return layers_under_checkpoint(module) and len(module.children) > 1


def is_segment(module: Module) -> bool:
    """Whether a module is one segment: a layer, units under one checkpoint, a checkpoint without units, or without children.

    The checkpoint of an MTP layer has a unit among other modules, which are segments of their own.
    """
    if module.kind is ModuleKind.LAYER or not module.children:
        return True
    return module.recomputed and len({is_unit(child) for child in module.children}) == 1


def segments(tree: Module) -> Iterator[Segment]:
    """Segments of a chunk in the order of execution."""
    if is_segment(tree):
        under = layers_under_checkpoint(tree)
        yield Segment(modules=tree.children if under else (tree,), units=under or is_unit(tree))
        return
    for child in tree.children:
        yield from segments(child)


def sharded_buckets(job: TrainingJob, tree: Module) -> tuple[ShardedBucket, ...]:
    """Buckets of one chunk in Megatron's order, which is also the order of prefetching.

    Up to 0.19 only the strategy that shards parameters has units. The others fill buckets across layers.
    """
    strategy = fsdp_of(job).strategy
    has_units = strategy == "optim_grads_params" or (strategy != "no_shard" and job.core.fsdp_units_without_sharding)
    groups: dict[tuple[int | None, bool, str], list[tuple[int, Parameter]]] = {}
    unit = 0
    for index, segment in enumerate(segments(tree)):
        for module in segment.modules:
            number = unit if segment.units and has_units else None
            unit += segment.units
            listed = creation_order(module)
            for parameter in listed if number is not None else _by_expert(job, tuple(listed)):
                key = (number, parameter.sharding == "expert", stored_dtype(job, parameter))
                groups.setdefault(key, []).append((index, parameter))
    padded: dict[tuple[int, ...], int] = {}
    rank_numel = sum(parameter.numel for listed in groups.values() for _, parameter in listed)
    return tuple(
        _bucket(job, members, unit=number, expert=expert, dtype=dtype, padded=padded)
        for (number, expert, dtype), listed in groups.items()
        for members in (_split(job, listed, rank_numel) if number is None else (listed,))
        if members
    )


def stored_dtype(job: TrainingJob, parameter: Parameter) -> str:
    """Element type in which a parameter is stored: FP8 with `--fp8-param-gather`."""
    fp8 = job.precision.fp8
    return "fp8" if parameter.quantized and fp8 is not None and fp8.stored_parameters else parameter.dtype


def gradient_dtype(job: TrainingJob, bucket: ShardedBucket) -> str:
    """Element type in which a bucket's gradients are accumulated. Before 0.19, fp32 gradients override the FSDP option."""
    if _overridden(job):
        return "fp32"
    return fsdp_of(job).main_gradients or ("bf16" if bucket.dtype == "fp8" else bucket.dtype)


def reduced_dtype(job: TrainingJob, bucket: ShardedBucket) -> str:
    """Element type of a bucket's unsharded gradients and of their reduction."""
    if _overridden(job):
        return "fp32"
    return fsdp_of(job).reduced_gradients or gradient_dtype(job, bucket)


def _overridden(job: TrainingJob) -> bool:
    return job.precision.gradients == "fp32" and job.core.fsdp_gradients_in_fp32


def _bucket(
    job: TrainingJob,
    members: Sequence[tuple[int, Parameter]],
    *,
    unit: int | None,
    expert: bool,
    dtype: str,
    padded: dict[tuple[int, ...], int],
) -> ShardedBucket:
    """One bucket. `padded` caches sizes, since equal layers share their parameter objects."""
    group = _sharding_group(job, expert=expert)
    parameters = tuple(parameter for _, parameter in members)
    key = (expert, *(id(parameter) for parameter in parameters))
    if key not in padded:
        shapes = [shape for parameter in parameters for shape in _shapes(parameter)]
        ranks = None if fsdp_of(job).strategy == "no_shard" else padding_ranks(job, group)
        padded[key] = padded_numel(shapes, ranks=ranks)
    return ShardedBucket(
        unit=unit,
        expert=expert,
        group=group,
        dtype=dtype,
        numel=padded[key],
        parameters=parameters,
        places=tuple(index for index, _ in members),
        segments=frozenset(index for index, _ in members),
    )


def _by_expert(job: TrainingJob, listed: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Parameters of a module outside units, those of each expert separately: a bucket may end between experts.

    Sequential experts are listed one after the other (`SequentialMLP`), and grouped ones weight by weight (`TEGroupedMLP`).
    """
    experts = [parameter for parameter in listed if parameter.sharding == "expert" and parameter.pieces > 1]
    for parameter in listed:
        if parameter not in experts:
            yield parameter
        elif job.model.moe is not None and job.model.moe.grouped_gemm:
            yield from (of_one_expert(parameter),) * parameter.pieces
        elif parameter is experts[0]:
            yield from tuple(of_one_expert(each) for each in experts) * parameter.pieces


@cache
def of_one_expert(parameter: Parameter) -> Parameter:
    """The weight or bias of one of several experts; other parameters are returned."""
    if parameter.sharding != "expert" or parameter.pieces == 1:
        return parameter
    return replace(parameter, shape=(1, *parameter.shape[1:]), pieces=1)


def _sharding_group(job: TrainingJob, *, expert: bool) -> ReductionGroup:
    """The group over which parameters are sharded.

    With several optimizer instances `FSDPDistributedIndex` (utils.py, 0.16.1) gets no mesh of experts and uses that of the dense
    model for them: `FullyShardedDataParallel._init_dist_index` creates one with a single instance only.
    """
    own_mesh = job.parallel.distributed_optimizer_instances == 1 or fsdp_of(job).expert_instances
    return "edp" if expert and own_mesh else "dp_cp"


def _split(job: TrainingJob, members: Sequence[tuple[int, Parameter]], rank_numel: int) -> Iterator[list[tuple[int, Parameter]]]:
    """Parameters outside units, split into buckets. A tied embedding that two pipeline stages share has a separate bucket."""
    strategy, limit = fsdp_of(job).strategy, bucket_size(job, rank_numel)
    bucket: list[tuple[int, Parameter]] = []
    for member in members:
        if member[1].shared_embedding and strategy != "no_shard":
            yield from (bucket, [member])
            bucket = []
            continue
        bucket.append(member)
        if limit is not None and sum(parameter.numel for _, parameter in bucket) >= limit:
            yield bucket
            bucket = []
    yield bucket


def bucket_size(job: TrainingJob, rank_numel: int) -> int | None:
    """Elements at which a bucket outside units is closed; None if all parameters share one bucket (`get_model`).

    `rank_numel`: elements of all parameters of the rank.
    """
    optimizer = job.optimizer
    if not optimizer.overlap_grad_reduce or optimizer.overlap_param_gather_with_optimizer_step:
        return None
    default = max(DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_RANK * job.parallel.data_with_context)
    if optimizer.ddp_num_buckets is not None:
        return rank_numel // optimizer.ddp_num_buckets
    return optimizer.ddp_bucket_size or default


def shard_ranks(job: TrainingJob, group: ReductionGroup) -> int:
    """Ranks over which parameters and gradients are sharded: those of one optimizer instance."""
    return reduction_size(job.parallel, group)


def padding_ranks(job: TrainingJob, group: ReductionGroup) -> int:
    """A bucket is padded to a multiple of this number of ranks: all ranks that share its fp32 master weights."""
    instances = job.parallel.distributed_optimizer_instances if fsdp_of(job).outer_sharding else 1
    return shard_ranks(job, group) * instances


def _shapes(parameter: Parameter) -> Iterator[Shape]:
    """Shapes as Megatron stores them: one weight per routed expert."""
    if parameter.sharding == "expert":
        yield from (parameter.shape[1:],) * parameter.shape[0]
    else:
        yield parameter.shape


def replicated_numel(job: TrainingJob, bucket: ShardedBucket) -> int:
    """Elements of weights replicated over tensor-parallel ranks whose gradients the described replica stores."""
    return sum(numel for numel, parameter in _in_shard(job, bucket) if parameter.sequence_parallel)


def described_shard(job: TrainingJob, bucket: ShardedBucket) -> tuple[int, ...]:
    """Elements of each parameter in the shard of the described replica (`described_replica`), without padding."""
    return tuple(numel for numel, _ in _in_shard(job, bucket))


def _in_shard(job: TrainingJob, bucket: ShardedBucket) -> Iterator[tuple[int, Parameter]]:
    shapes = [(shape, parameter) for parameter in bucket.parameters for shape in _shapes(parameter)]
    ranks = None if fsdp_of(job).strategy == "no_shard" else padding_ranks(job, bucket.group)
    offsets, _ = _laid_out([shape for shape, _ in shapes])
    size = bucket.numel // (ranks or 1)
    begin = size * _described_shard_index(job, bucket.group) if ranks else 0
    for offset, (shape, parameter) in zip(offsets, shapes, strict=True):
        inside = min(offset + prod(shape), begin + size) - max(offset, begin)
        yield max(0, inside), parameter


def _described_shard_index(job: TrainingJob, group: ReductionGroup) -> int:
    """Index of the described replica's shard. With outer sharding the shards of an instance's rank are neighbours in all instances
    (`FSDPDistributedIndex.get_logical_hybrid_fsdp_rank`)."""
    instance, inside = divmod(described_replica(job.parallel, group), shard_ranks(job, group))
    return inside * job.parallel.distributed_optimizer_instances + instance if fsdp_of(job).outer_sharding else inside


def padded_numel(shapes: Sequence[Shape], *, ranks: int | None) -> int:
    """Elements of a bucket. The total is a multiple of `ranks` rows; None if nothing is sharded."""
    _, end = _laid_out(shapes)
    return end if ranks is None else round_up(end, ranks * _row(shapes))


def _row(shapes: Sequence[Shape]) -> int:
    """Elements of a row, which is not split over ranks."""
    ordered = sorted(((prod(shape[1:]), prod(shape)) for shape in shapes), key=lambda sizes: -sizes[0])
    row = ordered[0][0]
    for own, size in ordered:
        fits = own == row or (row % own == 0 and size % row == 0) or size < row
        row = row if fits else lcm(row, own)
    return row


def _laid_out(shapes: Sequence[Shape]) -> tuple[tuple[int, ...], int]:
    """First element of each parameter, and the end of the last one.

    Rows of parameters are not split over ranks, so parameters start at multiples of the longest row. The unused end of a
    parameter's last row is filled with parameters that are shorter than a row.
    """
    row, sizes = _row(shapes), [prod(shape) for shape in shapes]
    ordered = sorted(range(len(shapes)), key=lambda index: -prod(shapes[index][1:]))
    regular = deque(index for index in ordered if sizes[index] >= row)
    fragments = [index for index in ordered if sizes[index] < row]
    offsets = [0] * len(shapes)
    end = 0
    while regular:
        index = regular.popleft()
        size, offsets[index] = sizes[index], end
        gap = end + size
        end += round_up(size, row)
        space = end - gap
        if not space:
            continue
        other = next((each for each in regular if sizes[each] % row and size % row + sizes[each] % row <= row), None)
        if other is not None:  # the last rows of both share one row
            regular.remove(other)
            offsets[other] = end - sizes[other] % row
            space -= sizes[other] % row
            end += sizes[other] // row * row
        for fragment in tuple(fragments):
            if sizes[fragment] <= space:
                space -= sizes[fragment]
                offsets[fragment], gap = gap, gap + sizes[fragment]
                fragments.remove(fragment)
    for fragment in fragments:
        offsets[fragment], end = end, end + sizes[fragment]
    return tuple(offsets), end
