"""Fragmentation of a rank's memory in PyTorch's caching allocator: blocks larger than their requests, and unused parts of segments.

A cached block is not split if 1 MiB or less would remain; the full block then counts as allocated. Adam's moments are created after
the first backward and use blocks that activations have freed, so their excess bytes stay allocated. Segments have unused parts if
no free block is large enough for a request.

The large tensors of a rank are therefore requested from a simulated allocator (`caching_allocator`) in the order of a training run:
weights, gradient buffers and fp32 master weights, the forwards and backwards of the first iteration, the moments, and the forwards
and backwards of a later iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from analyzer.buffers.gradient_buffers import Buffer, shard_pieces
from analyzer.buffers.parameter_order import parameter_runs
from analyzer.layout.data_parallel import reduction_size
from analyzer.memory.allocator.caching_allocator import SIDE_STREAM, SMALL_SIZE, CachingAllocator
from analyzer.memory.allocator.replicas import FIRST, Member
from analyzer.memory.allocator.script import TEMPORARY, Action, Place, Script
from analyzer.memory.allocator.settings import UNLIMITED, AllocatorSettings
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes
from analyzer.memory.workspaces import Workspace
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.results import MemoryPart, PeakEvent, RankMemory
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import adam_stores_master_weights, bytes_per_parameter
from analyzer.units import DTYPE_BYTES, dtype_bytes, round_up

MAX_REQUESTS: Final = 25_000
"""Maximum number of requests for all ranks together: about 30 ms. Other ranks get an estimate without fragmentation."""
IN_ITERATION: Final = (PeakEvent.FORWARD, PeakEvent.BACKWARD)


@dataclass(frozen=True)
class Fragmentation:
    """Bytes of one rank's blocks and segments in excess of its tensors."""

    unsplit: int
    """Allocated in excess of the requests, between iterations: blocks that are not split."""
    unsplit_at_first_peak: int
    """The same at the peak of the first iteration."""
    unsplit_at_peak: int
    """The same at the peak of a later iteration."""
    unused: int
    """Peak of the reserved bytes minus peak of the allocated bytes."""
    reserved: int
    """Peak of the reserved bytes of the large tensors."""


def is_replayed(job: TrainingJob) -> bool:
    """Whether the order of a job's allocations is known.

    It is not known with FSDP, CUDA graphs, activation or optimizer offloading, overlapped microbatches, deferred weight gradients,
    and optimizers that update one parameter after another.
    """
    elsewhere = job.fsdp or job.graphs or job.activation_offload or job.optimizer.offload or job.flags.defer_embedding_wgrad
    return not elsewhere and not job.flags.overlap_moe_expert_parallel_comm and job.optimizer.facts.updates == "in place"


def first_steps(order: Sequence[Step]) -> Sequence[Step]:
    """An iteration up to and including the first backward, when most memory is in use. Later steps reuse the same blocks."""
    return order[: 1 + next(place for place, step in enumerate(order) if step.kind == "backward")]


def requests(scripts: Sequence[Script], orders: Iterable[Sequence[Step]]) -> int:
    """The number of requests of a replay, which `MAX_REQUESTS` limits."""
    return sum(scripts[step.chunk].requests for order in orders for step in order if step.kind == "forward")


def with_fragmentation(job: TrainingJob, memory: RankMemory, found: Fragmentation) -> RankMemory:
    """The memory of a rank with the sizes of blocks instead of tensors.

    In the first iteration the blocks of moments do not exist yet. In the optimizer step the blocks of activations are free.
    Fragmentation can be larger in the first iteration than at the peak; the first iteration then has the highest peak.
    """
    if memory.peak_in_first_iteration:
        at_peak = found.unsplit_at_first_peak
    else:
        at_peak = found.unsplit_at_peak if memory.peak_event in IN_ITERATION else found.unsplit
    first_peak = memory.peak_allocated_first_iteration_bytes + found.unsplit_at_first_peak
    peak = max(memory.peak_allocated_bytes + at_peak, memory.allocated_bytes + found.unsplit, first_peak)
    reserved = round_up(peak + found.unused, SEGMENT)
    part = MemoryPart(name="fragmentation: blocks larger than their tensors", bytes=found.unsplit)
    difference = peak - memory.peak_allocated_bytes - found.unsplit
    difference_part = MemoryPart(
        name="fragmentation of activations" if difference > 0 else "fragmentation that starts after the first iteration",
        bytes=difference,
    )
    return replace(
        memory,
        runtime_bytes=memory.runtime_bytes + found.unsplit,
        runtime_parts=(*memory.runtime_parts, part) if found.unsplit else memory.runtime_parts,
        allocated_bytes=memory.allocated_bytes + found.unsplit,
        transient_bytes=memory.transient_bytes + difference,
        transient_parts=(*memory.transient_parts, difference_part) if difference else memory.transient_parts,
        peak_allocated_first_iteration_bytes=first_peak,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=peak, reserved=reserved, replayed=True),
        unsplit_bytes=found.unsplit,
        unsplit_at_first_peak_bytes=found.unsplit_at_first_peak,
        unsplit_at_peak_bytes=peak - memory.peak_allocated_bytes,
        replayed=True,
    )


def fragmentation(
    job: TrainingJob,
    stage: StageModel,
    buffers: Sequence[Sequence[Buffer]],
    scripts: Sequence[Script],
    workspaces: Sequence[Workspace],
    *,
    orders: tuple[Sequence[Step], Sequence[Step]],
    settings: AllocatorSettings,
    member: Member = FIRST,
    capacity_bytes: int = UNLIMITED,
) -> Fragmentation:
    """Replays the allocations of a rank.

    `orders` are the steps of the first iteration and of a later one, complete or up to a step. `member`: which part of the states
    of the distributed optimizer the rank has. Raises OutOfMemory if a request exceeds `capacity_bytes`.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    owned = _owned(job, stage, buffers, member)
    _allocate_states(job, stage, buffers, owned, allocator)
    remaining = _Workspaces(allocator, workspaces)
    _free(allocator, scripts, _iteration(scripts, orders[0], remaining))
    at_first_peak = allocator.unrequested_at_peak_bytes
    remaining.allocate_all()
    moments = bytes_per_parameter(job).moments
    _allocate_permanent(allocator, (int(each * numel) for numel in owned for each in moments))
    unsplit = allocator.unrequested_bytes
    allocator.peak_allocated_bytes = 0
    _iteration(scripts, orders[1], remaining)
    return Fragmentation(
        unsplit=unsplit,
        unsplit_at_first_peak=at_first_peak,
        unsplit_at_peak=allocator.unrequested_at_peak_bytes,
        unused=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,
        reserved=allocator.peak_reserved_bytes,
    )


def _allocate_permanent(allocator: CachingAllocator, sizes: Iterable[int]) -> None:
    """Allocates memory that is never freed."""
    for size, equal in groupby(sizes):
        if size > SMALL_SIZE:
            allocator.malloc_permanent(size, sum(1 for _ in equal))


def _allocate_states(
    job: TrainingJob,
    stage: StageModel,
    buffers: Sequence[Sequence[Buffer]],
    owned: Sequence[int],
    allocator: CachingAllocator,
) -> None:
    """Allocates weights, gradient buffers and fp32 master weights. The distributed optimizer moves the weights into a buffer."""
    element = int(DTYPE_BYTES[job.precision.parameters])
    sizes = [element * numel for numel in _numels(stage)]
    distributed = job.optimizer.distributed
    unbuffered = [allocator.malloc(size) for size in sizes if size > SMALL_SIZE] if distributed else []
    if not distributed:
        _allocate_permanent(allocator, sizes)
    for chunk in buffers:
        for buffer in chunk:
            if distributed:
                _allocate_permanent(allocator, [dtype_bytes(buffer.parameter_dtype, buffer.numel)])
            _allocate_permanent(allocator, [dtype_bytes(buffer.gradient_dtype, buffer.numel)])
    for address in unbuffered:
        allocator.free(address)
    if job.precision.parameters == "fp32" or adam_stores_master_weights(job):
        return
    for numel in owned:
        copy = allocator.malloc(element * numel) if element * numel > SMALL_SIZE else None
        if 4 * numel > SMALL_SIZE:
            allocator.malloc(4 * numel)
        if copy is not None:
            allocator.free(copy)


def _numels(stage: StageModel) -> list[int]:
    """Number of elements of each parameter of a rank; experts are listed separately."""
    return [numel for tree in stage.trees for numel in tree.derived(_numels_of_tree)]


def _numels_of_tree(tree: Module) -> tuple[int, ...]:
    sizes: list[int] = []
    for run in parameter_runs(tree):
        sizes += [each.numel // each.pieces for each in run.parameters if not each.frozen for _ in range(each.pieces)] * run.times
    return tuple(sizes)


def _owned(job: TrainingJob, stage: StageModel, buffers: Sequence[Sequence[Buffer]], member: Member) -> list[int]:
    """Number of elements of each parameter, or part of one, whose optimizer states are on the rank."""
    if not job.optimizer.distributed:
        return _numels(stage)
    index = dict(zip(("dp_cp", "edp"), member, strict=True))
    return [
        numel
        for chunk in buffers
        for buffer in chunk
        for numel in shard_pieces(buffer, reduction_size(job.parallel, buffer.group), member=index[buffer.group])
    ]


_InFlight = dict[tuple[int, int], list[int]]
"""The addresses in the slots of a script, by chunk and microbatch."""


class _Workspaces:
    """The workspaces of a rank that are not allocated yet. Each is allocated when a module that uses it runs for the first time."""

    def __init__(self, allocator: CachingAllocator, workspaces: Sequence[Workspace]) -> None:
        self._allocator = allocator
        large = [each for each in workspaces if each.bytes > SMALL_SIZE]
        _allocate_permanent(allocator, (each.bytes for each in large if not each.kinds))
        self._remaining = [each for each in large if each.kinds]

    def run(self, actions: Sequence[Action], places: Sequence[Place], phase: str, addresses: list[int]) -> None:
        """Runs the actions of one microbatch, and allocates the workspaces of their modules."""
        done = 0
        if any(each.phase == phase for each in self._remaining):
            for index, kind in places:
                wanted = [each for each in self._remaining if each.phase == phase and kind in each.kinds]
                if wanted:
                    _run(self._allocator, actions[done:index], addresses)
                    done = index
                    self._allocate(wanted)
        _run(self._allocator, actions[done:] if done else actions, addresses)

    def allocate_all(self) -> None:
        """Allocates the workspaces that no module has allocated, such as those of a later chunk."""
        self._allocate(self._remaining)

    def _allocate(self, wanted: Sequence[Workspace]) -> None:
        _allocate_permanent(self._allocator, (each.bytes for each in wanted))
        self._remaining = [each for each in self._remaining if each not in wanted]


def _iteration(scripts: Sequence[Script], order: Sequence[Step], workspaces: _Workspaces) -> _InFlight:
    """Replays the steps. Returns what the microbatches in flight have allocated."""
    running: _InFlight = {}
    for step in order:
        chunk = scripts[step.chunk]
        if step.kind == "forward":
            addresses = running[step.chunk, step.microbatch] = [0] * chunk.slots
            workspaces.run(chunk.forward, chunk.forward_places, "forward", addresses)
        else:
            workspaces.run(chunk.backward, chunk.backward_places, "backward", running.pop((step.chunk, step.microbatch)))
    return running


def _free(allocator: CachingAllocator, scripts: Sequence[Script], running: _InFlight) -> None:
    """Frees the saved tensors of the microbatches in flight."""
    for (chunk, _), addresses in running.items():
        _run(allocator, scripts[chunk].release, addresses)


def _run(allocator: CachingAllocator, actions: Sequence[Action], addresses: list[int]) -> None:
    """Runs the actions of one microbatch. `addresses` has the address in each slot."""
    malloc, free, malloc_and_free = allocator.malloc, allocator.free, allocator.malloc_and_free
    for size, slot, temporaries in actions:
        if size > 0:
            addresses[slot] = malloc(size)
        elif size:
            addresses[slot] = malloc(-size, stream=SIDE_STREAM)
        elif slot != TEMPORARY:
            free(addresses[slot])
        else:
            malloc_and_free(temporaries)
