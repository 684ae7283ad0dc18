"""Unsharded buckets of Megatron-FSDP in each segment of a chunk: prefetched parameters, and gradients before their reduction.

Source: megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py (`_register_fsdp_hooks`) and
param_and_grad_buffer.py (`AllGatherPipeline`, `GradReducePipeline`), 0.16.1. Before a module runs, its buckets are
gathered, and the following ones up to half of a communication unit. The buckets of a layer are freed after it has run.
Gradients of a bucket are accumulated unsharded, and freed after a communication unit of later gradients is queued. Buckets
outside layers stay allocated until the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor
from analyzer.specs import TrainingJob
from analyzer.states.buffers.fsdp import (
    Segment,
    ShardedBucket,
    bucket_size,
    fsdp_of,
    reduced_dtype,
    segments,
    shard_ranks,
    sharded_buckets,
)

MIN_UNIT: Final = 1_000_000_000
"""Minimum elements of a communication unit; two average layers if they are larger (`_init_fsdp_param_and_grad_buffer`)."""
BUFFERS: Final = 2
"""Layers that fit the persistent buffers of `--fsdp-double-buffer` (`UB_BUFFER_NUM`)."""
PARAMETERS: Final = "gathered parameters"
GRADIENTS: Final = "unsharded gradients"

Ids = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class ChunkPasses:
    """The unsharded buckets in each segment of a chunk, and how often each bucket is gathered per microbatch."""

    forward: tuple[Ids, ...]
    backward: tuple[Ids, ...]
    gradients: tuple[Ids, ...]
    backward_parts: tuple[tuple[Ids, ...], ...]
    """For each segment, the gathered buckets in the backward of each of its modules (`Gathering.parts`)."""
    gradient_parts: tuple[tuple[Ids, ...], ...]
    recompute_parts: tuple[tuple[Ids, ...], ...]
    """For each checkpoint around several layers, the gathered buckets while each layer runs forward again; empty elsewhere."""
    gathered_forward: tuple[int, ...]
    """For each bucket, including those gathered at the end of forward for the backward."""
    gathered_backward: tuple[int, ...]


@dataclass(frozen=True)
class Gathering:
    """Buckets of a chunk and where they are used."""

    job: TrainingJob
    tree: Module
    buckets: tuple[ShardedBucket, ...]

    @cached_property
    def all_segments(self) -> tuple[Segment, ...]:
        return tuple(segments(self.tree))

    @cached_property
    def parts(self) -> tuple[tuple[Ids, ...], ...]:
        """For each segment, the buckets of each of its modules; units are separate modules."""
        return self._parts([bucket.segments for bucket in self.buckets])

    @cached_property
    def accumulating_parts(self) -> tuple[tuple[Ids, ...], ...]:
        """`parts` of the modules in whose backward gradients are accumulated in their buckets."""
        return self._parts(self.accumulating)

    @cached_property
    def accumulating(self) -> tuple[Ids, ...]:
        """For each bucket, the segments in whose backward gradients are accumulated in it.

        These are the segments with its parameters, except for an output layer that MTP heads use as well: autograd sums its
        gradients until the head that ran first in the forward has run backward, unless GEMMs accumulate them.
        """
        uses = [
            index
            for index, segment in enumerate(self.all_segments)
            if any(module.kind is ModuleKind.OUTPUT_LAYER for module in segment.modules)
        ]
        if self.job.flags.gradient_accumulation_fusion or len(uses) < 2:
            return tuple(bucket.segments for bucket in self.buckets)
        return tuple(frozenset(uses[0] if index == uses[-1] else index for index in bucket.segments) for bucket in self.buckets)

    def _parts(self, used_in: Sequence[Ids]) -> tuple[tuple[Ids, ...], ...]:
        """For each segment, the buckets of each of its modules. `used_in`: the segments of each bucket."""
        of_segment: list[set[int]] = [set() for _ in self.all_segments]
        of_unit: dict[int, set[int]] = {}
        for number, bucket in enumerate(self.buckets):
            if bucket.unit is not None:
                of_unit.setdefault(bucket.unit, set()).add(number)
            else:
                for segment in used_in[number]:
                    of_segment[segment].add(number)
        parts: list[tuple[Ids, ...]] = []
        unit = 0
        for piece, outside in zip(self.all_segments, of_segment, strict=True):
            if piece.units and of_unit:
                parts.append(tuple(frozenset(of_unit[unit + index]) for index in range(len(piece.modules))))
                unit += len(piece.modules)
            else:
                parts.append((frozenset(outside),))
        return tuple(parts)

    @cached_property
    def together(self) -> tuple[Ids, ...]:
        """For each bucket, the buckets that are gathered with it: those of the same unit, experts separately."""
        members: dict[tuple[int, bool], set[int]] = {}
        for number, bucket in enumerate(self.buckets):
            if bucket.unit is not None:
                members.setdefault((bucket.unit, bucket.expert), set()).add(number)
        return tuple(
            frozenset({number} if bucket.unit is None else members[bucket.unit, bucket.expert])
            for number, bucket in enumerate(self.buckets)
        )

    @cached_property
    def unit_size(self) -> int:
        """Elements of a communication unit."""
        given = fsdp_of(self.job).communication_unit_size
        if given is not None:
            return given
        units = {bucket.unit for bucket in self.buckets if bucket.unit is not None}
        if not units:
            numel = sum(parameter.numel for bucket in self.buckets for parameter in bucket.parameters)
            return max(MIN_UNIT, bucket_size(self.job, numel) or 0)
        layers = sum(p.numel for bucket in self.buckets if bucket.unit is not None for p in bucket.parameters)
        return max(MIN_UNIT, layers // len(units) * 2)

    @cached_property
    def pooled(self) -> Ids:
        """Units that share the persistent buffers: the largest set of equal units."""
        if not fsdp_of(self.job).double_buffer:
            return frozenset()
        equal_units: dict[tuple[tuple[str, int], ...], set[int]] = {}
        for unit in sorted({bucket.unit for bucket in self.buckets if bucket.unit is not None}):
            key = tuple((b.dtype, sum(p.numel for p in b.parameters)) for b in self.buckets if b.unit == unit)
            equal_units.setdefault(key, set()).add(unit)
        largest: set[int] = max(equal_units.values(), key=len) if equal_units else set()
        return frozenset(largest)

    def with_prefetch(self, wanted: Ids, *, step: int) -> Ids:
        """The buckets to gather when `wanted` are needed, with prefetching. `step` is 1 in forward and -1 in backward."""
        chosen = set(wanted)
        units: set[int | None] = {self.buckets[number].unit for number in wanted} & self.pooled
        following = min(wanted) if step > 0 else max(wanted)
        extra = 0
        while extra < self.unit_size // 2:
            while following in chosen:
                following += step
            if not 0 <= following < len(self.buckets):
                break
            if fsdp_of(self.job).double_buffer:
                units = units | {self.buckets[following].unit}
                if len(units) > BUFFERS:
                    break
            added = self.together[following] - chosen
            extra += sum(self.buckets[number].numel for number in added)
            chosen |= added
        return frozenset(chosen)

    def started(self, segment: int) -> Ids:
        """The buckets whose first gradient in a backward is one of this segment."""
        return frozenset(number for number, used in enumerate(self.accumulating) if max(used, default=-1) == segment)

    def size(self, ids: Ids) -> int:
        """Elements of these buckets."""
        return sum(self.buckets[number].numel for number in ids)

    def tensors(self, ids: Ids, name: str) -> tuple[Tensor, ...]:
        """The unsharded buckets outside the persistent buffers, one tensor each."""
        found = []
        for number in sorted(ids):
            bucket = self.buckets[number]
            if shard_ranks(self.job, bucket.group) > 1 and bucket.unit not in self.pooled:
                dtype = bucket.dtype if name == PARAMETERS else reduced_dtype(self.job, bucket)
                found.append(Tensor(name=name, shape=(bucket.numel,), dtype=dtype, formula="full bucket"))
        return tuple(found)


def chunk_passes(job: TrainingJob, tree: Module, buckets: tuple[ShardedBucket, ...], *, first: bool = False) -> ChunkPasses:
    """One microbatch through a chunk; `first`: no backward has run yet."""
    chunk = Gathering(job, tree, buckets)
    gathered = [0] * len(buckets), [0] * len(buckets)
    nothing = tuple((frozenset[int](),) * len(parts) for parts in chunk.parts)
    forward: tuple[Ids, ...] = (frozenset(),) * len(chunk.all_segments)
    backward = gradients = nothing
    recomputed: tuple[tuple[Ids, ...], ...] = ((),) * len(chunk.all_segments)
    fsdp = fsdp_of(job)
    if fsdp.strategy == "optim_grads_params":
        outside = frozenset(number for number, bucket in enumerate(buckets) if bucket.unit is None)
        ready = set[int]() if first else set(outside)
        forward = tuple(_forward(chunk, ready, gathered[0], prefetches=first or fsdp.outside_layers_prefetches))
        passes = reversed(list(_backward(chunk, ready, gathered[1])))
        recomputed, backward = zip(*passes, strict=True)
    if fsdp.strategy in ("optim_grads", "optim_grads_params"):
        gradients = tuple(reversed(list(_gradients(chunk))))
    return ChunkPasses(
        forward=forward,
        backward=tuple(max(parts, key=chunk.size) for parts in backward),
        gradients=tuple(max(parts, key=chunk.size) for parts in gradients),
        backward_parts=backward,
        gradient_parts=gradients,
        recompute_parts=recomputed,
        gathered_forward=tuple(gathered[0]),
        gathered_backward=tuple(gathered[1]),
    )


def _gather(ready: set[int], needed: Ids, counts: list[int]) -> bool:
    """Gather the buckets that are not in `ready`. Returns whether there were any."""
    missing = needed - ready
    for number in missing:
        counts[number] += 1
    ready |= missing
    return bool(missing)


def _forward(chunk: Gathering, ready: set[int], counts: list[int], *, prefetches: bool) -> Iterator[Ids]:
    """The unsharded buckets in each segment. Updates `ready`. Layers always prefetch."""
    for piece, parts in zip(chunk.all_segments, chunk.parts, strict=True):
        largest: Ids = frozenset(ready)
        for wanted in parts:
            if wanted:
                _gather(ready, chunk.with_prefetch(wanted, step=1) if piece.units or prefetches else wanted, counts)
            largest = max(largest, frozenset(ready), key=chunk.size)
            if piece.units:
                ready -= wanted
        yield largest


def _backward(chunk: Gathering, ready: set[int], counts: list[int]) -> Iterator[tuple[tuple[Ids, ...], tuple[Ids, ...]]]:
    """The unsharded buckets in each module of each segment, last segment first: while it is recomputed, and in its backward.

    Only layers gather. Layers that were prefetched at the end of the forward are freed when the first other layer is gathered.
    """
    prefetched = {number for number in ready if chunk.buckets[number].unit is not None}
    for piece, parts in zip(reversed(chunk.all_segments), reversed(chunk.parts), strict=True):
        if not piece.units:
            yield (), (frozenset(ready),) * len(parts)
            continue
        recomputed: list[Ids] = []
        if len(parts) > 1:  # layers under one checkpoint run forward again, without prefetching
            for wanted in parts:
                prefetched -= wanted
                if _gather(ready, wanted, counts):
                    ready -= prefetched
                    prefetched = set()
                recomputed.append(frozenset(ready))
        found: list[Ids] = []
        for wanted in reversed(parts):
            prefetched -= wanted
            needed = chunk.with_prefetch(wanted, step=-1)
            if needed - ready:
                ready -= prefetched
                prefetched = set()
            _gather(ready, needed, counts)
            found.append(frozenset(ready))
            ready -= wanted
        yield tuple(recomputed), tuple(reversed(found))


def _gradients(chunk: Gathering) -> Iterator[tuple[Ids, ...]]:
    """Unsharded gradient buckets in each module of each segment, last segment first."""
    unfinished = {number: set(used) for number, used in enumerate(chunk.accumulating)}
    alive: set[int] = set()
    queue: list[int] = []
    for index in range(len(chunk.all_segments) - 1, -1, -1):
        found: list[Ids] = []
        for wanted in reversed(chunk.accumulating_parts[index]):
            alive |= wanted
            found.append(frozenset(alive))
            for number in sorted(wanted):
                unfinished[number].discard(index)
                if not unfinished[number]:
                    _free_reduced(chunk, alive, queue, number)
                    queue.append(number)
        yield tuple(reversed(found))


def _free_reduced(chunk: Gathering, alive: set[int], queue: list[int], next_bucket: int) -> None:
    """Free the oldest reduced buckets before another one is reduced."""
    pending = sum(chunk.buckets[number].numel for number in queue)
    next_unit = chunk.buckets[next_bucket].unit
    while queue and (pending > chunk.unit_size or _beyond_buffers(chunk, queue, next_unit)):
        oldest = queue.pop(0)
        pending -= chunk.buckets[oldest].numel
        alive.discard(oldest)


def _beyond_buffers(chunk: Gathering, queue: Sequence[int], next_unit: int | None) -> bool:
    """Whether the persistent buffers are too few for the pending units and the next one."""
    if not fsdp_of(chunk.job).double_buffer:
        return False
    return len({chunk.buckets[number].unit for number in queue} | {next_unit}) > BUFFERS


def gathered_after_step(job: TrainingJob, buckets: tuple[ShardedBucket, ...], tree: Module) -> int:
    """Bytes of parameters that are unsharded between iterations.

    After the optimizer step the first buckets are gathered for the next forward. `--log-params-norm` frees them,
    except for buckets outside layers that stay unsharded.
    """
    fsdp = fsdp_of(job)
    if fsdp.strategy != "optim_grads_params" or not buckets:
        return 0
    chunk = Gathering(job, tree, buckets)
    unsharded: Ids = frozenset()
    if fsdp.outside_layers_stay:
        unsharded = frozenset(number for number, bucket in enumerate(buckets) if bucket.unit is None)
    if not job.optimizer.log_params_norm:
        unsharded |= chunk.with_prefetch(chunk.together[0], step=1)
    return sum(tensor.bytes for tensor in chunk.tensors(unsharded, PARAMETERS))


def pool_bytes(job: TrainingJob, tree: Module) -> tuple[int, int]:
    """Bytes of the persistent buffers for parameters and for gradients; 0 without `--fsdp-double-buffer`."""
    chunk = Gathering(job, tree, sharded_buckets(job, tree))
    if not chunk.pooled:
        return 0, 0
    unit = min(chunk.pooled)
    in_unit = frozenset(number for number, bucket in enumerate(chunk.buckets) if bucket.unit == unit)
    unpooled = replace(chunk.job, fsdp=replace(fsdp_of(job), double_buffer=False))
    plain = Gathering(unpooled, tree, chunk.buckets)
    parameters, gradients = (
        BUFFERS * sum(tensor.bytes for tensor in plain.tensors(in_unit, name)) for name in (PARAMETERS, GRADIENTS)
    )
    return parameters, gradients
