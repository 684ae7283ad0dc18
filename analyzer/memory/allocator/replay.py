"""What PyTorch's caching allocator makes of a rank's tensors: blocks larger than requested, and segments.

A cached block is used whole if 1 MiB or less would be left of it, and all of it counts as allocated. Adam's moments, which are
created after the first backward, find the cache full of blocks that activations have left: what they take too much stays.
Segments are more than the blocks in them if no free block is large enough for the next tensor.

So the large tensors of a rank are requested from a simulated allocator (`caching_allocator`) in the order of a run: weights,
buffers and master weights, the forwards and backwards of the first iteration, moments, and those of another iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from analyzer.buffers.gradient_buffers import Buffer, shard_pieces
from analyzer.buffers.parameter_order import parameter_runs
from analyzer.layout.data_parallel import reduction_size
from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, AllocatorSettings, CachingAllocator
from analyzer.memory.allocator.script import TEMPORARY, Action, Script
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes
from analyzer.memory.workspaces import Workspace
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.results import MemoryPart, PeakEvent, RankMemory
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import adam_stores_master_weights, bytes_per_parameter
from analyzer.units import DTYPE_BYTES, dtype_bytes, round_up

MOST_REQUESTS: Final = 25_000
"""For all ranks together: about 30 ms. Beyond it the reserved bytes are an estimate, and blocks as large as tensors."""
IN_ITERATION: Final = (PeakEvent.FORWARD, PeakEvent.BACKWARD)


@dataclass(frozen=True)
class Fragmentation:
    """What blocks and segments add to the tensors of one rank, in bytes."""

    unsplit: int
    """Between iterations: allocated and not requested."""
    unsplit_at_first_peak: int
    """The same at the peak of the first iteration."""
    unsplit_at_peak: int
    """The same at the peak of a later one."""
    unused: int
    """Segments beyond the allocated bytes, when either is at its peak."""


def is_replayed(job: TrainingJob) -> bool:
    """Whether the tensors of a job are allocated in the order of its trees, and its states one by one.

    Not so with FSDP, CUDA graphs, activations or states on the host, overlapped microbatches, Muon and Lion.
    """
    elsewhere = job.fsdp or job.graphs or job.activation_offload or job.optimizer.offload
    return not elsewhere and not job.flags.overlap_moe_expert_parallel_comm and job.optimizer.name in ("adam", "sgd")


def first_steps(order: Sequence[Step]) -> Sequence[Step]:
    """An iteration up to the first backward, when most is in flight: later steps find the blocks of earlier ones."""
    return order[: 1 + next(place for place, step in enumerate(order) if step.kind == "backward")]


def requests(scripts: Sequence[Script], orders: Iterable[Sequence[Step]]) -> int:
    """The requests of a replay: what `MOST_REQUESTS` limits."""
    return sum(scripts[step.chunk].requests for order in orders for step in order if step.kind == "forward")


def with_fragmentation(job: TrainingJob, memory: RankMemory, found: Fragmentation) -> RankMemory:
    """The memory with blocks instead of tensors.

    The blocks of moments do not exist yet if the peak is in the first iteration; those of activations are free in the step.
    """
    if memory.peak_in_first_iteration:
        at_peak = found.unsplit_at_first_peak
    else:
        at_peak = found.unsplit_at_peak if memory.peak_event in IN_ITERATION else found.unsplit
    peak = memory.peak_allocated_bytes + at_peak
    reserved = round_up(peak + found.unused, SEGMENT)
    part = MemoryPart(name="fragmentation: blocks larger than their tensors", bytes=found.unsplit)
    more = at_peak - found.unsplit
    of_activations = MemoryPart(
        name="fragmentation of activations" if more > 0 else "fragmentation that does not exist yet", bytes=more
    )
    return replace(
        memory,
        runtime_bytes=memory.runtime_bytes + found.unsplit,
        runtime_parts=(*memory.runtime_parts, part) if found.unsplit else memory.runtime_parts,
        allocated_bytes=memory.allocated_bytes + found.unsplit,
        transient_bytes=memory.transient_bytes + more,
        transient_parts=(*memory.transient_parts, of_activations) if more else memory.transient_parts,
        peak_allocated_first_iteration_bytes=memory.peak_allocated_first_iteration_bytes + found.unsplit_at_first_peak,
        peak_allocated_bytes=max(peak, memory.allocated_bytes + found.unsplit),
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=peak, reserved=reserved),
        unsplit_bytes=found.unsplit,
        unsplit_at_first_peak_bytes=found.unsplit_at_first_peak,
        unsplit_at_peak_bytes=at_peak,
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
) -> Fragmentation:
    """Replays a rank. `orders` are the steps of the first iteration and of a later one, to their end or shorter."""
    allocator = CachingAllocator(settings)
    owned = _owned(job, stage, buffers)
    _allocate_states(job, stage, buffers, owned, allocator)
    _hold(allocator, (each.bytes for each in workspaces if each.phase == "forward"))
    _free(allocator, scripts, _iteration(allocator, scripts, orders[0]))
    at_first_peak = allocator.unrequested_at_peak_bytes
    _hold(allocator, (each.bytes for each in workspaces if each.phase == "backward"))
    moments = bytes_per_parameter(job).moments
    _hold(allocator, (int(each * numel) for numel in owned for each in moments))
    unsplit = allocator.unrequested_bytes
    allocator.peak_allocated_bytes = 0
    _iteration(allocator, scripts, orders[1])
    return Fragmentation(
        unsplit=unsplit,
        unsplit_at_first_peak=at_first_peak,
        unsplit_at_peak=allocator.unrequested_at_peak_bytes,
        unused=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,
    )


def _hold(allocator: CachingAllocator, sizes: Iterable[int]) -> None:
    """Allocates what is never freed."""
    for size, equal in groupby(sizes):
        if size > SMALL_SIZE:
            allocator.hold(size, sum(1 for _ in equal))


def _allocate_states(
    job: TrainingJob,
    stage: StageModel,
    buffers: Sequence[Sequence[Buffer]],
    owned: Sequence[int],
    allocator: CachingAllocator,
) -> None:
    """Weights, buffers and master weights. With the distributed optimizer the weights move into a buffer."""
    element = int(DTYPE_BYTES[job.precision.parameters])
    sizes = [element * numel for numel in _numels(stage)]
    distributed = job.optimizer.distributed
    own = [allocator.malloc(size) for size in sizes if size > SMALL_SIZE] if distributed else []
    if not distributed:
        _hold(allocator, sizes)
    for chunk in buffers:
        for buffer in chunk:
            if distributed:
                _hold(allocator, [dtype_bytes(buffer.parameter_dtype, buffer.numel)])
            _hold(allocator, [dtype_bytes(buffer.gradient_dtype, buffer.numel)])
    for address in own:
        allocator.free(address)
    if job.precision.parameters == "fp32" or adam_stores_master_weights(job):
        return
    _hold(allocator, (4 * numel for numel in owned))


def _numels(stage: StageModel) -> list[int]:
    """Elements of each parameter of a rank, of each expert separately."""
    return [numel for tree in stage.trees for numel in tree.derived(_numels_of_tree)]


def _numels_of_tree(tree: Module) -> tuple[int, ...]:
    sizes: list[int] = []
    for run in parameter_runs(tree):
        sizes += [each.numel // each.pieces for each in run.parameters for _ in range(each.pieces)] * run.times
    return tuple(sizes)


def _owned(job: TrainingJob, stage: StageModel, buffers: Sequence[Sequence[Buffer]]) -> list[int]:
    """Elements of each parameter, or piece of one, whose optimizer states the rank has."""
    if not job.optimizer.distributed:
        return _numels(stage)
    return [
        numel for chunk in buffers for buffer in chunk for numel in shard_pieces(buffer, reduction_size(job.parallel, buffer.group))
    ]


_InFlight = dict[tuple[int, int], list[int]]
"""The addresses in the slots of a script, by chunk and microbatch."""


def _iteration(allocator: CachingAllocator, scripts: Sequence[Script], order: Sequence[Step]) -> _InFlight:
    """Replays the steps. Returns what the microbatches in flight have allocated."""
    running: _InFlight = {}
    for step in order:
        written = scripts[step.chunk]
        if step.kind == "forward":
            held = running[step.chunk, step.microbatch] = [0] * written.slots
            _run(allocator, written.forward, held)
        else:
            _run(allocator, written.backward, running.pop((step.chunk, step.microbatch)))
    return running


def _free(allocator: CachingAllocator, scripts: Sequence[Script], running: _InFlight) -> None:
    """Frees what microbatches in flight have saved."""
    for (chunk, _), held in running.items():
        _run(allocator, scripts[chunk].release, held)


def _run(allocator: CachingAllocator, actions: Sequence[Action], held: list[int]) -> None:
    malloc, free, malloc_and_free = allocator.malloc, allocator.free, allocator.malloc_and_free
    for size, slot, sizes in actions:
        if size:
            held[slot] = malloc(size)
        elif slot != TEMPORARY:
            free(held[slot])
        else:
            malloc_and_free(sizes)
