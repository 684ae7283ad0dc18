"""Memory of one microbatch in a model chunk, combined from the blocks of the chunk's program.

Bytes are above the memory before the chunk's forward. Consecutive equal layers are one block with a count. Their memory changes by
a constant per layer, except for the first of them in backward, so the peak is in the first, the second or the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, NamedTuple

from analyzer.memory.block_memory import BlockMemory, Instant, Setting, block_memory, highest_level
from analyzer.memory.point import Point
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import RECOMPUTED_OUTPUT
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import Block, chunk_program
from analyzer.program.lowering import covers_layers

_LAYERS: Final = (ModuleKind.LAYER, ModuleKind.CHECKPOINT)


class Situation(NamedTuple):
    """The kind of a pass of a chunk by one microbatch."""

    backward: bool = False
    alone: bool = False
    """In backward: no other microbatch of the chunk is in flight."""
    left: bool = False
    """What checkpoints did not free in an earlier backward of the chunk is allocated."""


FORWARD: Final = Situation()
BACKWARD: Final = Situation(backward=True)


class Span(NamedTuple):
    """Consecutive repetitions of a block in a pass, between which the memory changes by a constant."""

    block: Module
    parent: str
    times: int
    before: int
    """Saved bytes at the first repetition, without what the block saves itself."""
    step: int
    """The difference of these bytes from one repetition to the next."""
    setting: Setting
    outside: tuple[Tensor, ...] = ()
    """Tensors from outside the block that are allocated during all of it."""
    held: tuple[Tensor, ...] = ()
    """The same from the sum of the residual gradients on."""

    def levels(self, *, backward: bool) -> Iterator[tuple[Instant, int]]:
        """The instants of the first and the last repetition, each with all allocated bytes."""
        around = total_bytes(self.outside)
        for repetition in sorted({0, self.times - 1}):
            before = self.before + repetition * self.step + around
            for instant, level in block_memory(self.block).levels(self.setting, backward=backward):
                yield instant, before + level

    def point(self, instant: Instant, allocated: int) -> Point:
        """An instant of `levels`."""
        outside = (*self.outside, *self.held) if instant.past_branch else self.outside
        saved = allocated - total_bytes(outside) - instant.temporary
        return Point(self.block, self.parent, instant, saved, allocated, outside)

    def highest(self, *, backward: bool) -> int:
        """Bytes at the highest instant."""
        most = self.before + max(0, (self.times - 1) * self.step)
        return most + highest_level(self.block, self.setting, backward=backward) + total_bytes(self.outside)


class ChunkMemory:
    """Memory of the forward and the backward of one chunk by one microbatch."""

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        received: tuple[Tensor, ...] = (),
        first_forward: ChunkMemory | None = None,
        graph: int = 0,
    ) -> None:
        self._blocks = [(block, block_memory(block.module)) for block in blocks]
        self._received = received
        self._spans: dict[Situation, tuple[Span, ...]] = {}
        self._peaks: dict[Situation, int] = {}
        self.first_forward = first_forward
        """The same chunk in the very first forward, if it differs from later ones."""
        self.graph = graph
        """`Module.graph_bytes`: allocated from a backward until the end of the next forward."""
        self.retained = sum(block.times * memory.retained for block, memory in self._blocks)
        """Bytes that stay allocated from its forward until its backward."""
        self.leftover = sum(block.times * memory.leftover for block, memory in self._blocks)
        """Bytes that its checkpoints leave allocated from their backward until their next forward."""

    @property
    def leftover_input(self) -> int:
        """Bytes of the input of the checkpoint that runs last in backward, if it was received and the schedule may reference it."""
        return next((memory.leftover_input for _, memory in self._blocks if memory.leftover), 0)

    @cached_property
    def reloaded(self) -> int:
        """Bytes that are offloaded in forward and on the GPU when the backward of the chunk begins.

        Groups of an earlier layer are among them if the last layer has no group of that name.
        """
        last = next((block.module for block, _ in reversed(self._blocks) if block.module.kind is ModuleKind.LAYER), None)
        return 0 if last is None else last.retained_before_backward - last.retained_bytes + total_bytes(last.reloaded_ahead)

    def peak(self, situation: Situation) -> int:
        """Bytes at the highest instant of a pass."""
        found = self._peaks.get(situation)
        if found is None:
            backward = situation.backward
            found = self._peaks[situation] = max(span.highest(backward=backward) for span in self.spans(situation))
        return found

    def points(self, situation: Situation) -> Iterator[Point]:
        """Instants of a pass in order. Of consecutive equal layers only those that can contain the peak."""
        for span in self.spans(situation):
            for instant, allocated in span.levels(backward=situation.backward):
                yield span.point(instant, allocated)

    def highest(self, situation: Situation) -> Point:
        """The highest instant of a pass."""
        return max(self.points(situation), key=lambda point: point.bytes)

    @cached_property
    def before_dispatch(self) -> Point | None:
        """The highest instant of a forward before the dispatch of its last MoE layer; None without one."""
        points = tuple(self.points(FORWARD))
        dispatches = [index for index, point in enumerate(points) if point.instant.kind is ModuleKind.DISPATCH]
        return max(points[: dispatches[-1]], key=lambda point: point.bytes, default=None) if dispatches else None

    def spans(self, situation: Situation) -> tuple[Span, ...]:
        """The blocks of a pass in the order of execution."""
        found = self._spans.get(situation)
        if found is None:
            spans = self._backward(situation) if situation.backward else self._forward(situation.left)
            found = self._spans[situation] = tuple(spans)
        return found

    def _forward(self, left: bool) -> Iterator[Span]:
        """With `left`, what each checkpoint left is allocated until its block dispatches tokens."""
        before = 0
        rest = self.leftover if left else 0
        frame: tuple[Tensor, ...] = ()
        for block, memory in self._blocks:
            freed = memory.leftover if left else 0
            step = memory.retained - freed
            yield Span(block.module, block.parent, block.times, before + rest - freed, step, Setting(left=left), frame)
            before += block.times * memory.retained
            rest -= block.times * freed
            frame += memory.frame

    def _backward(self, situation: Situation) -> Iterator[Span]:
        """The received gradient is that of the residual stream during the last branch of the last layer, which counts it.

        After this branch the residual gradient is a new tensor, and `output_tensor_grad` of core/pipeline_parallel/schedules.py
        still references the received one.
        """
        _, alone, left = situation
        blocks, received = self._blocks, self._received
        last_layers = _last_layers(blocks)
        until_lookup, waiting = _waiting([block.module for block, _ in blocks])
        before, gradient = self.retained, 0
        past = False
        if left:
            before += self.leftover
        for index in range(len(blocks) - 1, -1, -1):
            block, memory = blocks[index]
            more = memory.lingering if alone else 0
            step = more - memory.retained + (0 if left else memory.leftover)
            outside = waiting if index in until_lookup else ()
            branch = index == last_layers and block.module.kind in _LAYERS
            for first, times in ((True, 1), (False, block.times - 1)):
                if not times:
                    continue
                shared = gradient if first or memory.leftover_gradient is None else memory.leftover_gradient
                is_last = first and index == last_layers
                held = received if first and branch else ()
                held += _held(block.module, received=bool(received) and is_last, left=shared > 0)
                around = (*received, *outside) if past or (index == last_layers and not first) else outside
                setting = Setting(total_bytes(held), shared, alone, left)
                own = before - memory.retained - (memory.leftover if left else 0)
                yield Span(block.module, block.parent, times, own, step, setting, around, held)
                before += times * step
            past = past or index == last_layers
            if memory.leftover_gradient is not None:
                gradient = memory.leftover_gradient
            elif block.module.kind in _LAYERS and block.module.children:  # the residual gradient is a new tensor
                gradient = 0


def chunk_memory(tree: Module, *, received: tuple[Tensor, ...] = (), first: Module | None = None) -> ChunkMemory:
    """The memory of a chunk.

    `received` is the gradient of its output, if another stage sends one. `first` is the tree in the very first forward, if it
    differs.
    """
    first_forward = None if first is None else chunk_memory(first, received=received)
    return ChunkMemory(chunk_program(tree).blocks, received=received, first_forward=first_forward, graph=tree.graph_bytes)


class ChunkFigures(NamedTuple):
    """The figures of `ChunkMemory` in bytes."""

    retained: int
    forward_peak: int
    backward_peak: int
    next_backward_peak: int


def chunk_figures(blocks: Sequence[Block], *, received: tuple[Tensor, ...] = ()) -> ChunkFigures:
    """The peaks of a chunk in bytes."""
    memory = ChunkMemory(blocks, received=received)
    backward = memory.peak(BACKWARD)
    return ChunkFigures(
        retained=memory.retained,
        forward_peak=memory.peak(FORWARD),
        backward_peak=backward,
        next_backward_peak=memory.peak(Situation(backward=True, left=True)) if memory.leftover else backward,
    )


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


def _last_layers(blocks: Sequence[tuple[Block, BlockMemory]]) -> int | None:
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
