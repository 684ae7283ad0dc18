"""The forward of one microbatch overlapped with the backward of another (`--overlap-moe-expert-parallel-comm`).

Layers are paired: the first layer of the forward with the last layer of the backward, and so on. The expert communication of one
runs while the other computes. The saved bytes of the forward grow while those of the backward shrink.

Source: core/models/common/model_chunk_schedule_plan.py `TransformerModelChunkSchedulePlan.run` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from analyzer.memory.block_memory import Instant, block_memory, branch_of, explained
from analyzer.memory.chunk_memory import Point
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import chunk_program
from analyzer.schedule.pipeline import Step

_LAYER_KINDS = (ModuleKind.LAYER, ModuleKind.CHECKPOINT, ModuleKind.MTP)
"""Kinds of blocks that are overlapped with a block of the other microbatch."""


class _Placed(NamedTuple):
    """An instant of a unit."""

    block: Module
    parent: str
    instant: Instant
    saved: int
    """Bytes saved by the microbatch at that instant."""
    frame: tuple[Tensor, ...]
    """Tensors of earlier blocks that local variables reference in forward."""

    @property
    def feed_forward(self) -> bool:
        """Whether it is in the FFN or MoE branch of a layer."""
        path, _ = explained(self.block, self.instant)
        return branch_of(path, self.block) is ModuleKind.FEED_FORWARD


@dataclass(frozen=True)
class _Unit:
    """A layer, or all blocks before the layers, or all blocks after them."""

    modules: tuple[tuple[Module, str], ...]
    """Blocks, each with the path of its parent."""
    before: int
    """Bytes that earlier units save."""

    @property
    def retained(self) -> int:
        return sum(module.retained_bytes for module, _ in self.modules)

    @property
    def after(self) -> int:
        """Bytes that this unit and earlier units save."""
        return self.before + self.retained

    def forward(self, frame: list[Tensor]) -> list[_Placed]:
        """Instants of its forward. Appends to `frame` what local variables reference until the chunk's forward returns."""
        placed: list[_Placed] = []
        here = self.before
        for module, parent in self.modules:
            memory = block_memory(module)
            placed += [_Placed(module, parent, instant, here + instant.saved, tuple(frame)) for instant in memory.forward]
            frame += memory.frame
            here += memory.retained
        return placed

    def backward(self) -> list[_Placed]:
        """Instants of its backward."""
        placed: list[_Placed] = []
        here = self.before
        for module, parent in self.modules:
            memory = block_memory(module)
            placed += [_Placed(module, parent, instant, here + instant.saved, ()) for instant in memory.backward]
            here += memory.retained
        return placed


def overlapped_peaks(trees: Sequence[Module], order: Sequence[Step], *, early: bool) -> dict[tuple[int, int], Point]:
    """The peaks of the overlapped steps of `order`, by (chunk of the forward, chunk of the backward).

    `trees`: one for each chunk.
    """
    pairs = {(step.chunk, after.chunk) for step, after in pairwise(order) if step.paired}
    return {(one, other): overlapped_peak(trees[one], trees[other], early=early) for one, other in sorted(pairs)}


def overlapped_peak(forward: Module, backward: Module, *, early: bool = False) -> Point:
    """The peak of the forward of one microbatch overlapped with the backward of another one.

    `forward` and `backward` are the trees of their chunks. The bytes of the result include both microbatches. `early`: the
    backward of attention runs before the experts of the other microbatch, not after them.
    """
    return max(_instants(_units(forward), _units(backward), early=early), key=lambda point: point.bytes)


def _units(tree: Module) -> tuple[_Unit, list[_Unit], _Unit]:
    """All blocks before the layers, the layers, and all blocks after them."""
    blocks = [(block.module, block.parent) for block in chunk_program(tree).blocks for _ in range(block.times)]
    places = [index for index, (module, _) in enumerate(blocks) if module.kind in _LAYER_KINDS]
    start = places[0] if places else next((index for index, each in enumerate(blocks) if _after_layers(each[0])), len(blocks))
    first = _Unit(tuple(blocks[:start]), 0)
    kept = first.retained
    layers = []
    for index in places:
        layers.append(_Unit((blocks[index],), kept))
        kept = layers[-1].after
    rest = tuple(each for index, each in enumerate(blocks) if index >= start and index not in places)
    return first, layers, _Unit(rest, kept)


def _after_layers(module: Module) -> bool:
    return module.kind in (ModuleKind.FINAL_NORM, ModuleKind.DECODER, ModuleKind.OUTPUT_LAYER)


def _instants(
    forward: tuple[_Unit, list[_Unit], _Unit], backward: tuple[_Unit, list[_Unit], _Unit], *, early: bool
) -> Iterator[Point]:
    f_first, f_layers, f_last = forward
    b_first, b_layers, b_last = backward
    frame: list[Tensor] = []
    yield from _one_microbatch(f_first.forward(frame), other_saved=b_last.after)
    yield from _one_microbatch(b_last.backward(), other_saved=f_first.retained)
    pairs = min(len(f_layers), len(b_layers))
    for one, other in zip(f_layers[:pairs], reversed(b_layers[len(b_layers) - pairs :]), strict=True):
        yield from _paired_layers(one, other, frame, early=early)
    kept = f_layers[pairs].before if pairs < len(f_layers) else f_last.before
    for other in reversed(b_layers[: len(b_layers) - pairs]):
        yield from _one_microbatch(other.backward(), other_saved=kept)
    for one in f_layers[pairs:]:
        yield from _one_microbatch(one.forward(frame), other_saved=b_first.retained)
    yield from _one_microbatch(f_last.forward(frame), other_saved=b_first.retained)
    yield from _one_microbatch(b_first.backward(), other_saved=f_last.after)


def _paired_layers(forward: _Unit, backward: _Unit, frame: list[Tensor], *, early: bool) -> Iterator[Point]:
    """The forward of one layer and the backward of another: attention forward, FFN backward, FFN forward, attention backward.

    With `early` the last two are in the opposite order. Each microbatch computes during the expert communication of the other one
    (`TransformerLayerSchedulePlan.run`).
    """
    f_attention, f_experts = _halves(forward.forward(frame))
    b_attention, b_experts = _halves(backward.backward())
    between = f_experts[0].saved if f_experts else forward.after
    yield from _one_microbatch(f_attention, other_saved=backward.after)
    yield from _one_microbatch(b_experts, other_saved=between)
    if early:
        yield from _one_microbatch(b_attention, other_saved=between)
        yield from _one_microbatch(f_experts, other_saved=backward.before)
        return
    yield from _one_microbatch(f_experts, other_saved=b_attention[0].saved if b_attention else backward.before)
    yield from _one_microbatch(b_attention, other_saved=forward.after)


def _halves(placed: Sequence[_Placed]) -> tuple[list[_Placed], list[_Placed]]:
    """Instants of a layer's attention, and instants of its FFN or MoE branch."""
    return [each for each in placed if not each.feed_forward], [each for each in placed if each.feed_forward]


def _one_microbatch(placed: Sequence[_Placed], *, other_saved: int) -> Iterator[Point]:
    """Instants of one microbatch. The other microbatch has saved `other_saved` bytes."""
    for each in placed:
        saved = other_saved + each.saved
        yield Point(
            block=each.block,
            parent=each.parent,
            instant=each.instant,
            saved=saved,
            bytes=saved + each.instant.temporary + total_bytes(each.frame),
            outside=each.frame,
        )
