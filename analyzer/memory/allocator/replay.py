"""What PyTorch's caching allocator makes of a rank's tensors: blocks larger than asked for, and segments.

A cached block is handed out whole where 1 MiB or less would be left of it, and counts as allocated in whole. Adam's moments,
made after the first backward, find the cache full of blocks that activations have left: what they take too much stays.
Segments are more than the blocks in them where no free block is large enough for the next tensor.

So the large tensors of a rank are requested of a model of the allocator (`caching_allocator`) in the order of a run: weights,
buffers and masters, the forwards and backwards of the first iteration, moments, and those of another one. The trees give the
order of modules; within one, what it keeps is taken to be made before its temporaries, and these to live while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from analyzer.buffers.gradient_buffers import shard_pieces
from analyzer.buffers.of_stage import stage_buffers
from analyzer.buffers.parameter_order import creation_order
from analyzer.errors import UnsupportedError
from analyzer.layout.data_parallel import reduction_size
from analyzer.memory.allocator.caching_allocator import SMALL_SIZE, AllocatorSettings, CachingAllocator
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes
from analyzer.memory.iteration import order_of
from analyzer.memory.workspaces import Workspace, workspaces
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Tensor
from analyzer.results import MemoryPart, RankClass, RankMemory
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import adam_keeps_masters, bytes_per_parameter
from analyzer.units import DTYPE_BYTES, dtype_bytes, round_up

MOST_REQUESTS: Final = 25_000
"""For all ranks together: about 30 ms. Beyond it the reserved bytes are an estimate, and blocks as large as tensors."""
Request = tuple[int, int]
"""Bytes and the slot that gets the block; 0 bytes give back what the slot holds."""


@dataclass(frozen=True)
class Blocks:
    """Of one rank."""

    unsplit: int
    """Bytes between iterations that are allocated and were not asked for."""
    unsplit_at_first_peak: int
    """The same at the peak of the first iteration."""
    unsplit_at_peak: int
    """The same at the peak of a later one."""
    unused: int
    """Bytes of segments beyond the allocated bytes, when either is at its peak."""


@dataclass(frozen=True)
class Script:
    """The requests of a chunk's forward and backward for one microbatch."""

    forward: tuple[Request, ...]
    backward: tuple[Request, ...]
    release: tuple[Request, ...]
    """What the forward kept is given back, and nothing else."""
    slots: int

    def __len__(self) -> int:
        return len(self.forward) + len(self.backward)


def script(tree: Module) -> Script:
    """Requests for the large tensors of a chunk."""
    writer = _Writer()
    kept = writer.forward(tree)
    forward, writer.requests = tuple(writer.requests), []
    writer.drop_all(kept)
    release, writer.requests = tuple(writer.requests), []
    writer.backward(tree, kept)
    return Script(forward, tuple(writer.requests), release, writer.slots)


@dataclass(frozen=True)
class _Kept:
    """Slots of what a module keeps, and its children."""

    slots: list[int]
    children: list[_Kept]


class _Writer:
    """Writes requests while it walks a tree."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.slots = 0

    def make(self, tensors: Sequence[Tensor]) -> list[int]:
        made = []
        for size in (tensor.bytes // tensor.pieces for tensor in tensors for _ in range(tensor.pieces)):
            if size > SMALL_SIZE:
                self.requests.append((size, self.slots))
                made.append(self.slots)
                self.slots += 1
        return made

    def drop(self, slots: Sequence[int]) -> None:
        self.requests += [(0, slot) for slot in slots]

    def forward(self, module: Module) -> _Kept:
        kept = self.make(module.saved)
        temporary = self.make(module.forward_workspace)
        children = [self.forward(child) for child in module.children]
        if module.recomputed:
            for child in children:
                self.drop_all(child)
            children = []
        self.drop(temporary)
        return _Kept(kept, children)

    def drop_all(self, kept: _Kept) -> None:
        self.drop(kept.slots)
        for child in kept.children:
            self.drop_all(child)

    def backward(self, module: Module, kept: _Kept) -> None:
        temporary = self.make(module.backward_workspace)
        children = [self.forward(child) for child in module.children] if module.recomputed else kept.children
        for child, of_child in zip(reversed(module.children), reversed(children), strict=True):
            self.backward(child, of_child)
        self.drop(kept.slots)
        self.drop(temporary)


def is_replayed(job: TrainingJob) -> bool:
    """Whether the tensors of a launch are made in the order of its trees, and its states one by one.

    Not so with sharded parameters, CUDA graphs, activations or states on the host, microbatches side by side, and Muon.
    """
    elsewhere = job.fsdp or job.graphs or job.activation_offload or job.optimizer.offload
    return not elsewhere and not job.flags.overlap_moe_expert_parallel_comm and job.optimizer.name in ("adam", "sgd")


def refined(job: TrainingJob, stages: Sequence[StageModel], ranks: Sequence[RankClass]) -> tuple[RankClass, ...]:
    """The ranks with the memory that the allocator makes of it, the fullest first, as far as `MOST_REQUESTS` go.

    All come back as they are where the settings of the allocator are not simulated.
    """
    try:
        settings = AllocatorSettings.of({"PYTORCH_ALLOC_CONF": job.flags.allocator_config or ""})
    except UnsupportedError:
        return tuple(ranks)
    scripts: dict[int, Script] = {}
    for stage in stages:
        for tree in stage.trees:
            if id(tree) not in scripts:
                scripts[id(tree)] = script(tree)
    found = list(ranks)
    left = MOST_REQUESTS
    for index in sorted(range(len(ranks)), key=lambda index: -ranks[index].memory.device_bytes):
        stage = stages[index]
        orders = (_order(job, stage, job.batch.first_microbatches), _order(job, stage, job.batch.microbatches))
        left -= sum(len(scripts[id(stage.trees[step.chunk])]) for order in orders for step in order if step.kind == "forward")
        if left < 0:
            break
        memory = found[index].memory
        own = [scripts[id(tree)] for tree in stage.trees]
        made = blocks(job, stage, own, workspaces(job, stage.trees), orders=orders, settings=settings)
        found[index] = replace(found[index], memory=_with_blocks(job, memory, made))
    return tuple(found)


def _order(job: TrainingJob, stage: StageModel, microbatches: int) -> Sequence[Step]:
    """An iteration up to the first backward, when most is in flight: what comes after finds the blocks of what was before."""
    order = order_of(job, stage, microbatches)
    return order[: 1 + next(place for place, step in enumerate(order) if step.kind == "backward")]


def _with_blocks(job: TrainingJob, memory: RankMemory, made: Blocks) -> RankMemory:
    """The memory with blocks in the place of tensors.

    Those of the moments are not there yet where the peak is in the first iteration; those of activations are gone where it is
    in the step.
    """
    if memory.peak_at.startswith("first iteration"):
        at_peak = made.unsplit_at_first_peak
    else:
        at_peak = made.unsplit_at_peak if memory.peak_at.startswith(("forward", "backward")) else made.unsplit
    peak = memory.peak_allocated_bytes + at_peak
    reserved = round_up(peak + made.unused, SEGMENT)
    part = MemoryPart(name="blocks that the allocator does not split", bytes=made.unsplit)
    more = at_peak - made.unsplit
    of_activations = MemoryPart(
        name="blocks of activations that it does not split" if more > 0 else "blocks not there yet", bytes=more
    )
    return replace(
        memory,
        runtime_bytes=memory.runtime_bytes + made.unsplit,
        runtime_parts=(*memory.runtime_parts, part) if made.unsplit else memory.runtime_parts,
        allocated_bytes=memory.allocated_bytes + made.unsplit,
        transient_bytes=memory.transient_bytes + more,
        transient_parts=(*memory.transient_parts, of_activations) if more else memory.transient_parts,
        peak_allocated_first_iteration_bytes=memory.peak_allocated_first_iteration_bytes + made.unsplit_at_first_peak,
        peak_allocated_bytes=max(peak, memory.allocated_bytes + made.unsplit),
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=peak, reserved=reserved),
        unsplit_bytes=made.unsplit,
        unsplit_at_first_peak_bytes=made.unsplit_at_first_peak,
        unsplit_at_peak_bytes=at_peak,
        replayed=True,
    )


def blocks(
    job: TrainingJob,
    stage: StageModel,
    scripts: Sequence[Script],
    items: Sequence[Workspace],
    *,
    orders: tuple[Sequence[Step], Sequence[Step]],
    settings: AllocatorSettings,
) -> Blocks:
    """Runs a rank's requests. `orders` are those of the first iteration and of a later one, to their end or shorter."""
    allocator = CachingAllocator(settings)
    _states(job, stage, allocator)
    _hold(allocator, (item.bytes for item in items if item.phase == "forward"))
    _iteration(allocator, scripts, orders[0])
    at_first_peak = allocator.unasked_at_peak_bytes
    _hold(allocator, (item.bytes for item in items if item.phase == "backward"))
    _hold(allocator, _moments(job, stage))
    unsplit = allocator.unasked_bytes
    allocator.peak_allocated_bytes = 0
    _iteration(allocator, scripts, orders[1])
    return Blocks(
        unsplit=unsplit,
        unsplit_at_first_peak=at_first_peak,
        unsplit_at_peak=allocator.unasked_at_peak_bytes,
        unused=allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,
    )


def _hold(allocator: CachingAllocator, sizes: Iterator[int]) -> None:
    """Requests what is never given back."""
    for size in sizes:
        if size > SMALL_SIZE:
            allocator.malloc(size)


def _states(job: TrainingJob, stage: StageModel, allocator: CachingAllocator) -> None:
    """Weights, buffers and masters. With the distributed optimizer the weights move into a buffer."""
    element = int(DTYPE_BYTES[job.precision.parameters])
    sizes = [element * numel for numel in _numels(stage)]
    distributed = job.optimizer.distributed
    own = [allocator.malloc(size) for size in sizes if size > SMALL_SIZE] if distributed else []
    if not distributed:
        _hold(allocator, iter(sizes))
    for buffers in stage_buffers(job, stage):
        for buffer in buffers:
            if distributed:
                _hold(allocator, iter([dtype_bytes(buffer.parameter_dtype, buffer.numel)]))
            _hold(allocator, iter([dtype_bytes(buffer.gradient_dtype, buffer.numel)]))
    for address in own:
        allocator.free(address)
    if job.precision.parameters == "fp32" or adam_keeps_masters(job):
        return
    _hold(allocator, (4 * numel for numel in _owned(job, stage)))


def _numels(stage: StageModel) -> list[int]:
    """Elements of each parameter of a rank, of each expert one by one."""
    listed = (parameter for tree in stage.trees for parameter in creation_order(tree))
    return [parameter.numel // parameter.pieces for parameter in listed for _ in range(parameter.pieces)]


def _owned(job: TrainingJob, stage: StageModel) -> list[int]:
    """Elements of each parameter, or piece of one, whose optimizer states the rank has."""
    if not job.optimizer.distributed:
        return _numels(stage)
    return [
        numel
        for buffers in stage_buffers(job, stage)
        for buffer in buffers
        for numel in shard_pieces(buffer, reduction_size(job.parallel, buffer.group))
    ]


def _moments(job: TrainingJob, stage: StageModel) -> Iterator[int]:
    """What the first step of the optimizer creates for each of them."""
    each = bytes_per_parameter(job).moments
    for numel in _owned(job, stage):
        for size in each:
            yield int(size * numel)


def _iteration(allocator: CachingAllocator, scripts: Sequence[Script], order: Sequence[Step]) -> None:
    malloc, free = allocator.malloc, allocator.free
    running: dict[tuple[int, int], list[int]] = {}

    def run(requests: Sequence[Request], held: list[int]) -> None:
        for size, slot in requests:
            if size:
                held[slot] = malloc(size)
            else:
                free(held[slot])

    for step in order:
        written = scripts[step.chunk]
        if step.kind == "forward":
            held = running[step.chunk, step.microbatch] = [0] * written.slots
            run(written.forward, held)
        else:
            run(written.backward, running.pop((step.chunk, step.microbatch)))
    for (chunk, _), held in running.items():
        run(scripts[chunk].release, held)
