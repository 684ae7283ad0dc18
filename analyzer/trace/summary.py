"""Summarizes a trace in the quantities of the formulas: saved bytes by module, model states, peaks and collectives.

A tensor is *saved* if it is allocated in the forward of a microbatch and freed in a backward. Parameters, gradients and optimizer
states are identified by their labels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from analyzer.trace.events import Allocation, CollectiveEvent, Event, Free, KernelCall, KernelEvent, Label, Mark
from analyzer.units import BLOCK, round_up


class CollectiveKey(NamedTuple):
    """Collectives that are compared as equal. Shapes are not compared, because libraries flatten tensors before sending them."""

    kind: str
    group: str
    elements: int
    dtype: str


@dataclass(slots=True)
class Block:
    """A live allocation."""

    bytes: int
    """Rounded up to the block size of the caching allocator."""
    module: str
    phase: str
    microbatch: int
    iteration: int
    role: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedIteration:
    """One iteration of a trace."""

    peak: int
    """Peak of the live bytes."""
    peak_module: str
    """Phase, microbatch and module of the peak."""
    allocated_after: int
    """Live bytes at the end of the iteration."""
    saved: dict[str, tuple[int, ...]]
    """By module: bytes of each tensor that the first microbatch saved for backward."""
    collectives: Counter[CollectiveKey]
    kernels: Counter[KernelCall] = field(default_factory=Counter)
    """GEMMs and attention kernels of forward and backward; empty if the recorder does not write them."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Summary of a trace. Sizes are in bytes."""

    iterations: tuple[RecordedIteration, ...]
    parameters: int
    gradients: int
    optimizer: int
    failed: int
    """Number of failed allocations."""


@dataclass
class _State:
    """The state while a trace is processed."""

    live: dict[int, Block] = field(default_factory=dict)
    stack: list[Mark] = field(default_factory=list)
    current: int = 0
    failed: int = 0
    peak: int = 0
    peak_module: str = ""
    iteration: int = -1
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    """Pointers of the most recent allocations."""
    phase: str = ""
    """Phase of the last enter mark."""
    microbatch: int = -1
    """Microbatch of the last enter mark that has one."""
    unassigned: list[Block] = field(default_factory=list)
    """Blocks allocated in a forward before a mark with its microbatch: the tensors of the batch."""
    saved: dict[str, list[int]] = field(default_factory=dict)
    collectives: Counter[CollectiveKey] = field(default_factory=Counter)
    kernels: Counter[KernelCall] = field(default_factory=Counter)
    iterations: list[RecordedIteration] = field(default_factory=list)


def summarize(events: Iterable[Event]) -> Recorded:
    """Summarize the events of any recorder in one pass. Modules need marks, and model states need labels."""
    state = _State()
    for event in events:
        if isinstance(event, Allocation):
            _allocate(state, event)
        elif isinstance(event, Free):
            _free(state, event.pointer)
        elif isinstance(event, Mark):
            _mark(state, event)
        elif isinstance(event, Label):
            block = state.live.get(event.pointer)
            if block is not None:
                block.role = event.role
        elif isinstance(event, CollectiveEvent):
            _communicate(state, event)
        elif isinstance(event, KernelEvent) and state.stack and state.stack[-1].phase in ("forward", "backward", "recompute"):
            state.kernels[event.call] += 1
    if state.iteration >= 0:
        _end_iteration(state)
    roles: Counter[str] = Counter()
    for block in state.live.values():
        roles[block.role] += block.bytes
    return Recorded(
        iterations=tuple(state.iterations),
        parameters=roles["parameter"],
        gradients=roles["gradient"],
        optimizer=roles["optimizer"],
        failed=state.failed,
    )


def _communicate(state: _State, event: CollectiveEvent) -> None:
    """Count a collective or message where it is sent."""
    if event.kind == "recv" and event.group in ("pp", "world"):
        _receive(state, event.bytes)
    if event.size == 1 or event.kind == "recv":
        return  # nothing is sent, or the sender counts it
    # with interleaved stages on two ranks, one direction uses the world communicator (p2p_communication.py)
    group = "pp" if event.kind == "send" and event.group == "world" else event.group
    state.collectives[CollectiveKey(event.kind, group, prod(event.shape), event.dtype)] += 1


def _receive(state: _State, size: int) -> None:
    """Mark the buffer of a received tensor: it belongs to no module, although it was allocated inside one."""
    for pointer in reversed(state.recent):
        block = state.live.get(pointer)
        if block is not None and block.bytes == round_up(size, BLOCK):
            block.role = "received"
            return


def _allocate(state: _State, event: Allocation) -> None:
    if event.failed:
        state.failed += 1
        return
    inner = state.stack[-1] if state.stack else None
    size = round_up(event.bytes, BLOCK)
    block = state.live[event.pointer] = Block(
        bytes=size,
        module=inner.name if inner else "",
        phase=inner.phase if inner else "",
        microbatch=state.microbatch,
        iteration=inner.iteration if inner else -1,
    )
    if inner is not None and inner.phase == "forward" and inner.microbatch < 0:
        state.unassigned.append(block)
    state.recent.append(event.pointer)
    state.current += size
    if state.current > state.peak:
        state.peak = state.current
        state.peak_module = f"{inner.phase} of microbatch {inner.microbatch}, {inner.name}" if inner else ""


def _free(state: _State, pointer: int) -> None:
    block = state.live.pop(pointer, None)
    if block is None:
        return
    state.current -= block.bytes
    first = block.microbatch == 0 and block.iteration == state.iteration
    # outside all modules, a tensor of a module is freed by what ran last
    inside = bool(state.stack) and (bool(state.stack[-1].name) or not block.module)
    phase = state.stack[-1].phase if inside else state.phase
    if first and not block.role and block.phase == "forward" and phase in ("backward", "recompute"):
        state.saved.setdefault(block.module, []).append(block.bytes)


def _mark(state: _State, mark: Mark) -> None:
    if mark.iteration >= 0 and mark.iteration != state.iteration:
        if state.iteration >= 0:
            _end_iteration(state)
        state.iteration = mark.iteration
    if mark.kind == "leave":
        if state.stack:
            state.stack.pop()
        return
    state.stack.append(mark)
    state.phase = mark.phase
    if mark.microbatch >= 0:
        state.microbatch = mark.microbatch
        if mark.phase == "forward":
            for block in state.unassigned:
                block.microbatch = mark.microbatch
            state.unassigned = []


def _end_iteration(state: _State) -> None:
    state.iterations.append(
        RecordedIteration(
            peak=state.peak,
            peak_module=state.peak_module,
            allocated_after=state.current,
            saved={module: tuple(sorted(sizes, reverse=True)) for module, sizes in state.saved.items()},
            collectives=state.collectives,
            kernels=state.kernels,
        )
    )
    state.peak, state.peak_module = state.current, ""
    state.saved, state.collectives, state.kernels = {}, Counter(), Counter()
