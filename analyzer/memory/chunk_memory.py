"""Memory of one microbatch in a model chunk, combined from the blocks of the chunk's program.

Bytes are above the memory before the chunk's forward. Consecutive equal layers are one block with a count. From the second layer
on, their memory changes by a constant per layer, so the peak is in the first, the second or the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from analyzer.memory.after_backward import next_backward_peak, next_forward_peak
from analyzer.memory.block_memory import BlockMemory, Peaks, block_memory
from analyzer.memory.placement import Placement, Point, from_outside, placed
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import RECOMPUTED_OUTPUT
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import Block, chunk_program
from analyzer.program.lowering import covers_layers

_LAYERS: Final = (ModuleKind.LAYER, ModuleKind.CHECKPOINT)


@dataclass(frozen=True, kw_only=True)
class ChunkMemory:
    """Memory of the forward and the backward of one chunk."""

    retained: int
    """Bytes that stay allocated from its forward until its backward."""
    forward: tuple[Placement, ...]
    backward: tuple[Placement, ...]
    frames: tuple[tuple[Tensor, ...], ...]
    """For each placement of the forward, tensors of earlier blocks that local variables reference."""
    received: tuple[Tensor, ...]
    """The gradient that the schedule references throughout the backward; empty for a chunk with the loss."""
    forward_peak: Point
    next_forward_peak: Point
    """The peak of a forward that follows a backward of this chunk: the leftover of each layer is allocated until its dispatch."""
    backward_peak: Point
    lone_backward_peak: Point
    """The peak of a backward of the only microbatch in flight, in which `Point.lingering` is allocated."""
    next_backward_peak: Point
    """The peak of a backward that follows a backward of this chunk without a forward in between.

    The leftover of the earlier backward is still allocated in each layer that has not run yet.
    """
    first_forward: ChunkMemory | None = None
    """The same chunk in the very first forward, if it differs from later ones."""
    leftover: int = 0
    """Bytes that its checkpoints leave allocated from their backward until their next forward."""
    leftover_of_last: int = 0
    """The part of `leftover` of the checkpoint that ran last in backward."""
    leftover_input: int = 0
    """Bytes of the input of that checkpoint, if it was received and the schedule may also reference it."""
    reloaded: int = 0
    """Bytes copied back from the host at the end of the preceding backward."""
    graph: int = 0
    """`Module.graph_bytes`: allocated from a backward until the end of the next forward."""

    @cached_property
    def peak_before_dispatch(self) -> Point | None:
        """The peak of a forward before the dispatch of its last MoE layer; None without one."""
        if not any(instant.kind is ModuleKind.DISPATCH for placement in self.forward for instant in placement.memory.forward):
            return None
        points = tuple(self.points("forward"))
        last = max(index for index, point in enumerate(points) if point.instant.kind is ModuleKind.DISPATCH)
        return max(points[:last], key=lambda point: point.bytes, default=None)

    def points(self, direction: str) -> Iterator[Point]:
        """Instants of the "forward" or "backward" in order. Of consecutive equal layers only those that can contain the peak."""
        if direction == "forward":
            for placement, frame in zip(self.forward, self.frames, strict=True):
                for instant in placement.memory.forward:
                    yield placed(placement, instant, outside=frame)
        else:
            for placement in self.backward:
                yield from self.points_of(placement)

    def points_of(self, placement: Placement) -> Iterator[Point]:
        """Instants of one repetition of a block in the backward."""
        for instant in placement.memory.backward:
            yield placed(placement, instant, outside=self.received)


def chunk_memory(tree: Module, *, received: tuple[Tensor, ...] = (), first: Module | None = None) -> ChunkMemory:
    """The memory of a chunk.

    `received` is the gradient of its output, if another stage sends one. During the last branch of the last layer it is the
    gradient of the residual stream, which that layer already counts. After this branch the residual gradient is a new tensor, and
    `output_tensor_grad` of core/pipeline_parallel/schedules.py still references the received one. `first` is the tree in the very
    first forward, if it differs.
    """
    blocks = [(block, block_memory(block.module)) for block in chunk_program(tree).blocks]
    forward, frames, retained = _forward(blocks)
    backward, ends = _backward(blocks, retained, received=bool(received))
    gradient = total_bytes(received)
    forward_peak, backward_peak = _forward_peak(forward, frames), _backward_peak(backward, received, gradient)
    left = ends.leftover
    return ChunkMemory(
        retained=retained,
        forward=forward,
        backward=backward,
        frames=frames,
        received=received,
        forward_peak=forward_peak,
        next_forward_peak=next_forward_peak(blocks, forward, frames, left) if left else forward_peak,
        backward_peak=backward_peak,
        lone_backward_peak=_backward_peak(backward, received, gradient, alone=True),
        next_backward_peak=next_backward_peak(backward, received, left) if left else backward_peak,
        first_forward=None if first is None else chunk_memory(first, received=received),
        leftover=ends.leftover,
        leftover_of_last=ends.leftover_of_last,
        leftover_input=ends.leftover_input,
        reloaded=_reloaded(blocks),
        graph=tree.graph_bytes,
    )


def _reloaded(blocks: Sequence[tuple[Block, BlockMemory]]) -> int:
    """Bytes that are offloaded in forward and on the GPU when the backward of the chunk begins.

    Groups of an earlier layer are among them if the last layer has no group of that name.
    """
    last = next((block.module for block, _ in reversed(blocks) if block.module.kind is ModuleKind.LAYER), None)
    return 0 if last is None else last.retained_before_backward - last.retained_bytes + total_bytes(last.reloaded_ahead)


class ChunkFigures(NamedTuple):
    """The figures of `ChunkMemory` in bytes, without the instants at which they occur."""

    retained: int
    forward_peak: int
    backward_peak: int
    next_backward_peak: int


def chunk_figures(blocks: Sequence[Block], *, received: tuple[Tensor, ...] = ()) -> ChunkFigures:
    """The peaks of a chunk in bytes. They are equal to those of `chunk_memory`."""
    with_memory = [(block, block_memory(block.module)) for block in blocks]
    forward, frames, retained = _forward(with_memory)
    backward, ends = _backward(with_memory, retained, received=bool(received))
    gradient = total_bytes(received)
    highest = max(_highest(each, each.memory.backward_peaks, gradient, leftover=each.leftover) for each in backward)
    return ChunkFigures(
        retained=retained,
        forward_peak=max(
            each.before + each.memory.forward_peak + total_bytes(frame) for each, frame in zip(forward, frames, strict=True)
        ),
        backward_peak=highest,
        next_backward_peak=next_backward_peak(backward, received, ends.leftover).bytes if ends.leftover else highest,
    )


class _Ends(NamedTuple):
    """Bytes that checkpoints leave allocated after the backward of a chunk, as in `ChunkMemory`."""

    leftover: int
    leftover_of_last: int
    leftover_input: int


def _forward(
    blocks: list[tuple[Block, BlockMemory]],
) -> tuple[tuple[Placement, ...], tuple[tuple[Tensor, ...], ...], int]:
    placements: list[Placement] = []
    frames: list[tuple[Tensor, ...]] = []
    before = 0
    frame: tuple[Tensor, ...] = ()
    for block, memory in blocks:
        for repetition in sorted({0, block.times - 1}):
            placements.append(Placement(block, memory, before + repetition * memory.retained))
            frames.append(frame)
        before += block.times * memory.retained
        frame += memory.frame
    return tuple(placements), tuple(frames), before


def _backward(blocks: list[tuple[Block, BlockMemory]], retained: int, *, received: bool) -> tuple[tuple[Placement, ...], _Ends]:
    placements: list[Placement] = []
    last_layers = _last_layers(blocks)
    before = retained
    leftover = shared = lingering = 0
    until_lookup, gradient = _waiting([block.module for block, _ in blocks])
    ends = _Ends(0, 0, 0)
    past = False
    for index in range(len(blocks) - 1, -1, -1):
        block, memory = blocks[index]
        for repetition in _repetitions(block.times):
            left = shared if repetition == 0 or memory.leftover_gradient is None else memory.leftover_gradient
            placements.append(
                Placement(
                    block,
                    memory,
                    before - (repetition + 1) * memory.retained,
                    leftover + repetition * memory.leftover,
                    left,
                    branch=index == last_layers and repetition == 0 and block.module.kind in _LAYERS,
                    past=past or (index == last_layers and repetition > 0),
                    held=_held(block.module, received=received and index == last_layers and repetition == 0, left=left > 0),
                    lingering=lingering + repetition * memory.lingering,
                    waiting=gradient if index in until_lookup else (),
                )
            )
        before -= block.times * memory.retained
        leftover += block.times * memory.leftover
        lingering += block.times * memory.lingering
        if memory.leftover_gradient is not None:
            shared = memory.leftover_gradient
        elif block.module.kind in _LAYERS and block.module.children:  # the residual gradient is a new tensor
            shared = 0
        if memory.leftover_of_last is not None:
            ends = _Ends(leftover, memory.leftover_of_last, memory.leftover_input)
        past = past or index == last_layers
    return tuple(placements), ends._replace(leftover=leftover)


def _waiting(modules: list[Module]) -> tuple[range, tuple[Tensor, ...]]:
    """The gradient of a tied embedding that output layers compute, from their backward until that of the first lookup of tokens.

    On a later stage MTP layers look up tokens, and the embedding is only a copy of the weight.
    """
    begin = max((index for index, module in enumerate(modules) if module.waiting), default=0)
    looking_up = (index for index in range(begin) if modules[index].derived(_looks_up))
    return range(next(looking_up, 0), begin), modules[begin].waiting


def _looks_up(module: Module) -> bool:
    """Whether the module or a part of it looks up tokens in the word embedding."""
    return any(each.kind is ModuleKind.WORD_EMBEDDINGS and bool(each.saved) for _, each in module.walk())


def _held(module: Module, *, received: bool, left: bool) -> tuple[Tensor, ...]:
    """The gradient of the output of a checkpoint around layers, after the last branch has added to it in a new tensor.

    It is counted elsewhere if the schedule references it (`received`), or if the following checkpoint left it allocated (`left`).
    """
    if received or left or not covers_layers(module):
        return ()
    outputs = (each for each in module.backward_workspace if each.name == RECOMPUTED_OUTPUT)  # without unsharded buckets of FSDP
    return tuple(replace(each, name="gradient of the checkpoint's output") for each in outputs)


def _repetitions(count: int) -> list[int]:
    """Indices of the first, the second and the last of `count` equal layers: from the second on, figures change by a constant."""
    return sorted({0, min(1, count - 1), count - 1})


def _last_layers(blocks: list[tuple[Block, BlockMemory]]) -> int | None:
    """The index of the block in whose backward the received gradient stops being the gradient of the residual stream.

    A final norm, or MTP layers with the final norm before them, count it.
    """
    kinds = [block.module.kind for block, _ in blocks]
    if kinds[-1:] == [ModuleKind.FINAL_NORM]:
        return len(kinds) - 1
    if ModuleKind.MTP in kinds:
        layers = [index for index, kind in enumerate(kinds) if kind in _LAYERS]
        norm = kinds.index(ModuleKind.FINAL_NORM) if ModuleKind.FINAL_NORM in kinds else kinds.index(ModuleKind.MTP)
        return max(norm, layers[-1] + 1 if layers else 0)
    found = [
        index
        for index, (block, _) in enumerate(blocks)
        if (block.module.kind is ModuleKind.LAYER and block.module.children) or covers_layers(block.module)
    ]
    return found[-1] if found else None


def _forward_peak(placements: tuple[Placement, ...], frames: tuple[tuple[Tensor, ...], ...]) -> Point:
    index = max(
        range(len(placements)),
        key=lambda index: placements[index].before + placements[index].memory.forward_peak + total_bytes(frames[index]),
    )
    placement = placements[index]
    instant = max(placement.memory.forward, key=lambda each: each.bytes)
    return placed(placement, instant, outside=frames[index])


def _highest(placement: Placement, peaks: Peaks, gradient: int, *, leftover: int) -> int:
    """The peak of one repetition in bytes, including `leftover` and the received gradient."""
    base = placement.before + leftover + total_bytes(placement.waiting)
    past_gradient = (gradient if placement.past or placement.branch else 0) + total_bytes(placement.held)
    plain_gradient = gradient if placement.past else 0
    return base + max(
        peaks.plain + plain_gradient,
        peaks.past + past_gradient,
        peaks.sharing + plain_gradient - placement.shared,
        peaks.sharing_past + past_gradient - placement.shared,
    )


def _backward_peak(placements: tuple[Placement, ...], received: tuple[Tensor, ...], gradient: int, *, alone: bool = False) -> Point:
    """The highest instant of a backward; if `alone`, including `Point.lingering`, which its bytes do not contain."""

    def highest(each: Placement) -> int:
        peaks = each.memory.backward_peaks_alone if alone else each.memory.backward_peaks
        return _highest(each, peaks, gradient, leftover=each.leftover + alone * each.lingering)

    placement = max(placements, key=highest)
    instant = max(
        placement.memory.backward,
        key=lambda each: each.bytes + alone * each.lingering + from_outside(placement, each, gradient),
    )
    return placed(placement, instant, outside=received)
