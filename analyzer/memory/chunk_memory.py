"""Memory of one microbatch that goes through a model chunk: the blocks of its program put together.

Bytes are above what was allocated before the chunk's forward. Equal layers in a row are one block with a count: what their
instants need differs by a constant from one layer to the next, so the first, the second and the last of them have the peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.memory.block_memory import BlockMemory, Instant, Peaks, block_memory, explained
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import Block, chunk_program
from analyzer.program.lowering import covers_layers

_LAYERS: Final = (ModuleKind.LAYER, ModuleKind.CHECKPOINT)


class Point(NamedTuple):
    """An instant of a chunk, in bytes above what was allocated before the chunk's forward."""

    block: Module
    """The module whose operations are the block that the instant belongs to."""
    parent: str
    """Dotted path of the module around the block."""
    instant: Instant
    saved: int
    """Saved for backward."""
    bytes: int
    """Everything allocated."""
    left: int = 0
    """Of `saved`, what checkpoints left behind in this backward."""
    beside: tuple[Tensor, ...] = ()
    """Allocated beside the block and what is saved."""

    @property
    def path(self) -> str:
        """Dotted path of the module that runs."""
        path, _ = explained(self.block, self.instant)
        return f"{self.parent}.{path}" if self.parent else path

    @property
    def transient(self) -> tuple[Tensor, ...]:
        """Allocated beside what is saved."""
        _, tensors = explained(self.block, self.instant)
        return (*tensors, *self.beside)


class Placement(NamedTuple):
    """Where a block's repetition starts."""

    block: Block
    memory: BlockMemory
    before: int
    """Bytes saved by earlier modules of the chunk."""
    left: int = 0
    """In backward: bytes left behind by checkpoints of later modules."""
    shared: int = 0
    """Of `left`, the gradient that this block may count in its workspace."""
    branch: bool = False
    """In backward: the block has the last layer, or comes before the one that has."""
    past: bool = False
    """In backward: the last branch of the chunk's last layer is over."""


@dataclass(frozen=True, kw_only=True)
class ChunkMemory:
    """One chunk's forward and backward."""

    retained: int
    """Bytes that stay between its forward and its backward."""
    forward: tuple[Placement, ...]
    backward: tuple[Placement, ...]
    frames: tuple[tuple[Tensor, ...], ...]
    """For each placement of the forward, tensors that frames of earlier blocks keep alive."""
    received: tuple[Tensor, ...]
    """The gradient that the schedule references throughout the backward; none for a chunk with the loss."""
    forward_peak: Point
    backward_peak: Point
    next_backward_peak: Point
    """The peak of a backward if the microbatch before left something behind in every layer that has not run again."""
    first_forward: ChunkMemory | None = None
    """The same chunk in the first forward of all, where it differs from later ones."""
    left: int = 0
    """Bytes that its checkpoints leave behind from their backward until their next forward."""
    left_of_layer: int = 0
    """Of these, what the checkpoint that ran last in backward leaves."""
    left_input: int = 0
    """What that checkpoint leaves beside, where its input was received and the schedule may reference it too."""

    def points(self, direction: str) -> Iterator[Point]:
        """Instants of the "forward" or "backward" in order: of equal layers in a row, those that can be a peak."""
        if direction == "forward":
            for placement, frame in zip(self.forward, self.frames, strict=True):
                for instant in placement.memory.forward:
                    yield _placed(placement, instant, beside=frame)
        else:
            for placement in self.backward:
                for instant in placement.memory.backward:
                    yield _placed(placement, instant, beside=self.received)


def chunk_memory(tree: Module, *, received: tuple[Tensor, ...] = (), first: Module | None = None) -> ChunkMemory:
    """The memory of a chunk.

    `received` is the gradient of its output, if another stage sends one. In the last branch of the last layer it is the gradient of
    the residual stream, which that layer counts; after the branch the residual gradient is a new tensor, and `output_tensor_grad`
    of core/pipeline_parallel/schedules.py still references the received one. `first` is the tree in the first forward of all.
    """
    blocks = [(block, block_memory(block.module)) for block in chunk_program(tree).blocks]
    forward, frames, retained = _forward(blocks)
    backward, ends = _backward(blocks, retained)
    gradient = total_bytes(received)
    return ChunkMemory(
        retained=retained,
        forward=forward,
        backward=backward,
        frames=frames,
        received=received,
        forward_peak=_forward_peak(forward, frames),
        backward_peak=_backward_peak(backward, received, gradient),
        next_backward_peak=_next_backward_peak(backward, received, gradient, ends),
        first_forward=None if first is None else chunk_memory(first, received=received),
        left=ends.left,
        left_of_layer=ends.left_of_layer,
        left_input=ends.left_input,
    )


class ChunkFigures(NamedTuple):
    """The figures of `ChunkMemory` without the instants that they belong to."""

    retained: int
    forward_peak: int
    backward_peak: int
    next_backward_peak: int


def chunk_figures(blocks: Sequence[Block], *, received: tuple[Tensor, ...] = ()) -> ChunkFigures:
    """The peaks of a chunk in bytes, as `chunk_memory` finds them."""
    with_memory = [(block, block_memory(block.module)) for block in blocks]
    forward, frames, retained = _forward(with_memory)
    backward, ends = _backward(with_memory, retained)
    gradient = total_bytes(received)
    highest = max(_highest(each, each.memory.backward_peaks, gradient, left=each.left) for each in backward)
    return ChunkFigures(
        retained=retained,
        forward_peak=max(
            each.before + each.memory.forward_peak + total_bytes(frame) for each, frame in zip(forward, frames, strict=True)
        ),
        backward_peak=highest,
        next_backward_peak=_next_backward_peak(backward, received, gradient, ends).bytes if ends.left else highest,
    )


class _Ends(NamedTuple):
    """What checkpoints have left behind when the backward of a chunk is over."""

    left: int
    left_of_layer: int
    left_input: int


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


def _backward(blocks: list[tuple[Block, BlockMemory]], retained: int) -> tuple[tuple[Placement, ...], _Ends]:
    placements: list[Placement] = []
    last_layers = _last_layers(blocks)
    before = retained
    left = shared = 0
    ends = _Ends(0, 0, 0)
    past = False
    for place in range(len(blocks) - 1, -1, -1):
        block, memory = blocks[place]
        for repetition in _repetitions(block.times):
            placements.append(
                Placement(
                    block,
                    memory,
                    before - (repetition + 1) * memory.retained,
                    left + repetition * memory.left,
                    shared if repetition == 0 or memory.left_gradient is None else memory.left_gradient,
                    branch=place == last_layers and repetition == 0 and block.module.kind in _LAYERS,
                    past=past or (place == last_layers and repetition > 0),
                )
            )
        before -= block.times * memory.retained
        left += block.times * memory.left
        if memory.left_gradient is not None:
            shared = memory.left_gradient
            ends = _Ends(left, memory.left_by_last or 0, memory.left_input)
        past = past or place == last_layers
    return tuple(placements), ends._replace(left=left)


def _repetitions(count: int) -> list[int]:
    """The first, the second and the last of so many equal layers: from the second on, figures change by a constant."""
    return sorted({0, min(1, count - 1), count - 1})


def _last_layers(blocks: list[tuple[Block, BlockMemory]]) -> int | None:
    """The place of the block in whose backward the received gradient stops being that of the residual stream.

    With multi-token prediction layers the whole of them, and the final norm before them, count it.
    """
    kinds = [block.module.kind for block, _ in blocks]
    if ModuleKind.MTP in kinds:
        layers = [place for place, kind in enumerate(kinds) if kind in _LAYERS]
        norm = kinds.index(ModuleKind.FINAL_NORM) if ModuleKind.FINAL_NORM in kinds else kinds.index(ModuleKind.MTP)
        return max(norm, layers[-1] + 1 if layers else 0)
    found = [
        place
        for place, (block, _) in enumerate(blocks)
        if (block.module.kind is ModuleKind.LAYER and block.module.children) or covers_layers(block.module)
    ]
    return found[-1] if found else None


def _forward_peak(placements: tuple[Placement, ...], frames: tuple[tuple[Tensor, ...], ...]) -> Point:
    place = max(
        range(len(placements)),
        key=lambda index: placements[index].before + placements[index].memory.forward_peak + total_bytes(frames[index]),
    )
    placement = placements[place]
    instant = max(placement.memory.forward, key=lambda each: each.bytes)
    return _placed(placement, instant, beside=frames[place])


def _highest(placement: Placement, peaks: Peaks, gradient: int, *, left: int) -> int:
    """The highest of a repetition's instants, `left` and the received gradient counted in."""
    base = placement.before + left
    past_gradient = gradient if placement.past or placement.branch else 0
    plain_gradient = gradient if placement.past else 0
    return base + max(
        peaks.plain + plain_gradient,
        peaks.past + past_gradient,
        peaks.sharing + plain_gradient - placement.shared,
        peaks.sharing_past + past_gradient - placement.shared,
    )


def _backward_peak(placements: tuple[Placement, ...], received: tuple[Tensor, ...], gradient: int) -> Point:
    placement = max(placements, key=lambda each: _highest(each, each.memory.backward_peaks, gradient, left=each.left))
    instant = max(placement.memory.backward, key=lambda each: each.bytes + _from_outside(placement, each, gradient))
    return _placed(placement, instant, beside=received)


def _next_backward_peak(placements: tuple[Placement, ...], received: tuple[Tensor, ...], gradient: int, ends: _Ends) -> Point:
    placement = max(
        placements,
        key=lambda each: _highest(each._replace(shared=0), each.memory.backward_peaks_without_left, gradient, left=0),
    )
    unshared = placement._replace(shared=0)
    instant = max(placement.memory.backward, key=lambda each: each.bytes - each.left + _from_outside(unshared, each, gradient))
    found = _placed(placement, instant, beside=received)
    more = max(0, ends.left - ends.left_of_layer - found.left)
    return found._replace(saved=found.saved + more, bytes=found.bytes + more)


def _from_outside(placement: Placement, instant: Instant, gradient: int) -> int:
    """Bytes that differ between the instants of a block's backward and come from outside the block."""
    shared = placement.shared if instant.shares_leftover else 0
    return (gradient if _counts_received(placement, instant) else 0) - shared


def _counts_received(placement: Placement, instant: Instant) -> bool:
    """Whether the received gradient is allocated beside what the block counts."""
    return placement.past or (placement.branch and instant.past_branch)


def _placed(placement: Placement, instant: Instant, *, beside: tuple[Tensor, ...]) -> Point:
    """An instant with everything that is allocated outside its block."""
    left = instant.left + placement.left - (placement.shared if instant.shares_leftover else 0)
    saved = placement.before + instant.saved - instant.left + left
    if instant.backward and not _counts_received(placement, instant):
        beside = ()
    return Point(
        block=placement.block.module,
        parent=placement.block.parent,
        instant=instant,
        saved=saved,
        bytes=saved + instant.temporary + total_bytes(beside),
        left=left,
        beside=beside,
    )
