"""Fragmentation of a rank's memory in PyTorch's caching allocator: blocks larger than their requests, and unused parts of segments.

A cached block is not split if 1 MiB or less would remain; the full block then counts as allocated. Adam's moments are created after
the first backward and use blocks that activations have freed, so their excess bytes stay allocated. Segments have unused parts if
no free block is large enough for a request.

The large tensors of a rank are therefore requested from a simulated allocator (`caching_allocator`) in the order of a training run:
weights, gradient buffers and fp32 master weights, the forwards and backwards of the first iteration, the optimizer step, and the
forwards and backwards of a later iteration. Pipeline messages are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from analyzer.memory.allocator.caching_allocator import SMALL_SIZE
from analyzer.memory.allocator.iterations import Phase, ReplayedIteration
from analyzer.memory.allocator.model_states import ModelStates, Temporary, allocate, allocate_permanent, free
from analyzer.memory.allocator.overlapped_script import FORWARD, HELD, Part
from analyzer.memory.allocator.runner import ScriptAllocator
from analyzer.memory.allocator.script import Action, ChunkScript, Place
from analyzer.memory.allocator.settings import UNLIMITED, AllocatorSettings
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes
from analyzer.memory.features import has_rare_features
from analyzer.memory.workspaces import Workspace
from analyzer.modules.kinds import ModuleKind
from analyzer.program.schedule.pipeline import Step
from analyzer.results import MemoryPart, PeakEvent, RankMemory
from analyzer.specs import TrainingJob
from analyzer.units import round_up

MAX_REQUESTS: Final = 25_000
"""Maximum number of requests for all ranks together: about 30 ms. Other ranks get an estimate without fragmentation."""
RARE_MAX_REQUESTS: Final = 100_000
"""The same with rare features, whose iterations have more requests, and for the highest rank alone."""
MOST_BYTES: Final = 2**46
"""Ranks with more memory, which no GPU has, get an estimate too: the addresses of a pool end at four times as much."""
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


def with_fragmentation(job: TrainingJob, memory: RankMemory, found: Fragmentation) -> RankMemory:
    """The memory of a rank with the sizes of blocks instead of tensors.

    In the first iteration the blocks of moments do not exist yet. In the optimizer step the blocks of activations are free.
    Fragmentation can be larger in the first iteration than at the peak; the first iteration then has the highest peak. With rare
    features only the reserved memory changes: where unsplit blocks are depends on the exact order of the requests.
    """
    if memory.peak_in_first_iteration:
        at_peak = found.unsplit_at_first_peak
    else:
        at_peak = found.unsplit_at_peak if memory.peak_event in IN_ITERATION else found.unsplit
    first_peak = memory.peak_allocated_first_iteration_bytes + found.unsplit_at_first_peak
    peak = max(memory.peak_allocated_bytes + at_peak, memory.allocated_bytes + found.unsplit, first_peak)
    reserved = round_up(peak + found.unused, SEGMENT)
    if not has_rare_features(job):
        memory = _with_unsplit(memory, found, peak=peak, first_peak=first_peak)
    return replace(
        memory,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(
            job, peak=memory.peak_allocated_bytes, reserved=reserved, replayed=True, garbage=memory.garbage_bytes
        ),
        replayed=True,
    )


def _with_unsplit(memory: RankMemory, found: Fragmentation, *, peak: int, first_peak: int) -> RankMemory:
    """The allocated memory of a rank with blocks that are not split. `peak` and `first_peak`: its peaks with them."""
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
        unsplit_bytes=found.unsplit,
        unsplit_at_first_peak_bytes=found.unsplit_at_first_peak,
        unsplit_at_peak_bytes=peak - memory.peak_allocated_bytes,
    )


def fragmentation(
    states: ModelStates,
    phases: Sequence[Phase],
    workspaces: Sequence[Workspace],
    *,
    settings: AllocatorSettings,
    capacity_bytes: int = UNLIMITED,
) -> Fragmentation:
    """Replays the allocations of a rank: its states, the first iteration, an optimizer step, and a later iteration.

    Raises OutOfMemory if a request exceeds `capacity_bytes`.
    """
    allocator = ScriptAllocator(settings, capacity_bytes=capacity_bytes)
    states.create(allocator)
    remaining = _Workspaces(allocator, workspaces)
    microbatches = _Microbatches(allocator, remaining)
    unsplit = at_first_peak = first_peak = 0
    for phase in phases:
        microbatches.release()
        if phase is not None:
            microbatches.run(phase)
            continue
        first_peak, at_first_peak = allocator.peak_allocated_bytes, allocator.unrequested_at_peak_bytes
        remaining.allocate_all()
        states.update(allocator, first=True)
        unsplit = allocator.unrequested_bytes
        allocator.peak_allocated_bytes = 0
    return Fragmentation(
        unsplit=unsplit,
        unsplit_at_first_peak=at_first_peak,
        unsplit_at_peak=allocator.unrequested_at_peak_bytes,
        unused=allocator.peak_reserved_bytes - max(first_peak, allocator.peak_allocated_bytes),
        reserved=allocator.peak_reserved_bytes,
    )


class _Workspaces:
    """The workspaces of a rank that are not allocated yet. Each is allocated when a module that uses it runs for the first time."""

    def __init__(self, allocator: ScriptAllocator, workspaces: Sequence[Workspace]) -> None:
        self._allocator = allocator
        large = [each for each in workspaces if each.bytes > SMALL_SIZE]
        allocate_permanent(allocator, (each.bytes for each in large if not each.kinds))
        self._remaining = [each for each in large if each.kinds]

    def forward(self, script: ChunkScript, addresses: list[int], layers: Sequence[int]) -> None:
        """Runs the forward of one microbatch, and allocates the workspaces of its modules. `layers`: `ReplayedIteration.layers`."""
        for (block, first), self._allocator.layer in zip(script.blocks, layers, strict=True):
            self._run(block.forward, block.forward_places, "forward", addresses, first=first)

    def backward(self, script: ChunkScript, addresses: list[int], layers: Sequence[int], *, done: int) -> None:
        """The same for the backward without the first actions, `done` in number."""
        if done:
            self._run(script.backward, script.backward_places, "backward", addresses, done=done)
            return
        for (block, first), self._allocator.layer in zip(reversed(script.blocks), reversed(layers), strict=True):
            self._run(block.backward, block.backward_places, "backward", addresses, first=first)

    def _run(
        self, actions: Sequence[Action], places: Sequence[Place], phase: str, addresses: list[int], *, first: int = 0, done: int = 0
    ) -> None:
        if self._remaining and any(each.phase == phase for each in self._remaining):
            for index, kind in places:
                wanted = [each for each in self._remaining if each.phase == phase and kind in each.kinds]
                if wanted:
                    self._allocator.run(actions[done:index], addresses, first)
                    done = max(done, index)
                    self._allocate(wanted)
        self._allocator.run(actions[done:] if done else actions, addresses, first)

    def allocate_all(self, *, in_step: bool = True) -> None:
        """Allocates the workspaces that no module has allocated, such as those of a later chunk.

        `in_step`: also those that are allocated after the last backward.
        """
        self._allocate([each for each in self._remaining if in_step or each.phase != "optimizer"])

    def _allocate(self, wanted: Sequence[Workspace]) -> None:
        allocate_permanent(self._allocator, (each.bytes // each.blocks for each in wanted for _ in range(each.blocks)))
        self._remaining = [each for each in self._remaining if each not in wanted]


class _Deferred:
    """The operands of deferred weight gradients of the output layer, and what their graphs reference."""

    def __init__(self, allocator: ScriptAllocator, iteration: ReplayedIteration) -> None:
        self._allocator = allocator
        self._iteration = iteration
        self._kept: list[int] = []
        self._calls = 0

    def backward(self, chunk: int, addresses: list[int]) -> int:
        """Runs the backward of the output layer in a chunk and keeps its operands. Returns the number of actions done."""
        if not self._defers(chunk):
            return 0
        script = self._iteration.scripts[chunk]
        places = script.backward_places
        after = next(index for index, (_, kind) in enumerate(places) if kind is ModuleKind.OUTPUT_LAYER) + 1
        end = places[after][0] if after < len(places) else len(script.backward)
        self._allocator.run(script.backward[:end], addresses)
        self.keep(chunk)
        return end

    def keep(self, chunk: int) -> None:
        """Keeps the operands of the last backward of a chunk; in the first one also those of all others but the last one."""
        deferral = self._iteration.deferral
        if deferral is None or not self._defers(chunk):
            return
        count = 1 if self._calls else max(1, deferral.calls - 1)
        self._calls += count
        self._kept += allocate(self._allocator, (*deferral.operands, deferral.graph_bytes) * count)

    def _defers(self, chunk: int) -> bool:
        deferral = self._iteration.deferral
        return deferral is not None and chunk == len(self._iteration.scripts) - 1 and self._calls < deferral.calls

    def end(self) -> None:
        """Computes the weight gradients."""
        free(self._allocator, self._kept)


class _Microbatches:
    """The microbatches in flight, with the addresses in the slots of their scripts."""

    def __init__(self, allocator: ScriptAllocator, workspaces: _Workspaces) -> None:
        self._allocator = allocator
        self._workspaces = workspaces
        self._running: dict[tuple[int, int], tuple[ChunkScript, list[int]]] = {}
        """By chunk and microbatch, the script of the chunk and the addresses."""
        self._left: dict[int, tuple[ChunkScript, list[int]]] = {}
        """For each chunk whose last backward left tensors allocated, its script and the addresses of that microbatch."""

    def run(self, iteration: ReplayedIteration) -> None:
        """Replays the steps of an iteration."""
        deferred = _Deferred(self._allocator, iteration)
        if iteration.captured is not None:
            self._allocator.empty_cache()
            allocate_permanent(self._allocator, (each.bytes for each in iteration.captured))
        for index, step in enumerate(iteration.order):
            self._free_left(step.chunk)
            if step.kind == "forward":
                chunk = iteration.scripts[step.chunk]
                addresses = [0] * chunk.slots
                self._running[step.chunk, step.microbatch] = chunk, addresses
                if index in iteration.overlapped:
                    self._overlap(iteration.overlapped[index], addresses, self._of(iteration.order[index + 1]))
                else:
                    self._workspaces.forward(chunk, addresses, iteration.layers(step.chunk))
            else:
                self._backward(iteration, index, deferred)
        deferred.end()
        if iteration.switches:
            self._allocator.switch_stream()

    def _of(self, step: Step) -> list[int]:
        """The addresses of the microbatch of a step."""
        return self._running[step.chunk, step.microbatch][1]

    def _backward(self, iteration: ReplayedIteration, index: int, deferred: _Deferred) -> None:
        step = iteration.order[index]
        chunk, addresses = iteration.scripts[step.chunk], self._of(step)
        if index - 1 in iteration.overlapped:
            deferred.keep(step.chunk)
        else:
            done = deferred.backward(step.chunk, addresses)
            self._workspaces.backward(chunk, addresses, iteration.layers(step.chunk), done=done)
        del self._running[step.chunk, step.microbatch]
        if chunk.leftover:
            self._left[step.chunk] = chunk, addresses

    def _overlap(self, parts: Iterable[Part], of_forward: list[int], of_backward: list[int]) -> None:
        """Runs an overlapped step."""
        self._workspaces.allocate_all(in_step=False)
        held = Temporary(self._allocator)
        for which, actions, tensors in parts:
            if which == HELD:
                held.become(tensors)
            else:
                self._allocator.run(actions, of_forward if which == FORWARD else of_backward)

    def release(self) -> None:
        """Frees the saved tensors of the microbatches in flight."""
        running = self._running.values()
        self._allocator.free_all(addresses[slot] for script, addresses in running for slot in script.saved)
        self._running = {}

    def _free_left(self, chunk: int) -> None:
        """Frees what the last backward of a chunk left allocated."""
        if chunk in self._left:
            script, addresses = self._left.pop(chunk)
            self._allocator.run(script.leftover, addresses)
