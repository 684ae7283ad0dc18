"""The forward of one microbatch overlapped with the backward of another (`--overlap-moe-expert-parallel-comm`).

Layer by layer, the first with the last: the expert communication of one runs while the other computes. What the forward saves
grows as what the backward has saved shrinks.

Source: core/models/common/model_chunk_schedule_plan.py `TransformerModelChunkSchedulePlan.run` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analyzer.memory.block_memory import Instant, block_memory, branch_of, explained
from analyzer.memory.chunk_memory import Point
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.program.chunks import chunk_program

_LAYER_KINDS = (ModuleKind.LAYER, ModuleKind.CHECKPOINT, ModuleKind.MTP)
"""Blocks that are overlapped with one of the other microbatch."""


class _Placed(NamedTuple):
    """An instant of a unit."""

    block: Module
    parent: str
    instant: Instant
    saved: int
    """Bytes saved by the microbatch at that instant."""
    frame: tuple[Tensor, ...]
    """Kept alive by the forward of earlier blocks."""

    @property
    def feed_forward(self) -> bool:
        """Whether it is in the FFN or MoE branch of a layer."""
        path, _ = explained(self.block, self.instant)
        return branch_of(path, self.block) is ModuleKind.FEED_FORWARD


@dataclass(frozen=True)
class _Unit:
    """A layer, or everything before the layers, or everything after them."""

    modules: tuple[tuple[Module, str], ...]
    """Blocks, with the path of the module around each."""
    before: int
    """Bytes that earlier units save."""

    @property
    def retained(self) -> int:
        return sum(module.retained_bytes for module, _ in self.modules)

    @property
    def after(self) -> int:
        """Bytes that it and earlier units save."""
        return self.before + self.retained

    def forward(self, frame: list[Tensor]) -> list[_Placed]:
        """Instants of its forward. `frame` collects what stays until the forward of the chunk returns."""
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


def overlapped_peak(forward: Module, backward: Module, *, early: bool = False) -> Point:
    """The peak of a forward through one chunk and a backward through another, of two microbatches.

    Its bytes are those of both. `early`: the backward of attention runs before the experts of the other microbatch, not after.
    """
    return max(_instants(_units(forward), _units(backward), early=early), key=lambda point: point.bytes)


def _units(tree: Module) -> tuple[_Unit, list[_Unit], _Unit]:
    """Everything before the layers, the layers, everything after them."""
    blocks = [(block.module, block.parent) for block in chunk_program(tree).blocks for _ in range(block.times)]
    places = [place for place, (module, _) in enumerate(blocks) if module.kind in _LAYER_KINDS]
    start = places[0] if places else next((place for place, each in enumerate(blocks) if _after_layers(each[0])), len(blocks))
    first = _Unit(tuple(blocks[:start]), 0)
    kept = first.retained
    layers = []
    for place in places:
        layers.append(_Unit((blocks[place],), kept))
        kept = layers[-1].after
    rest = tuple(each for place, each in enumerate(blocks) if place >= start and place not in places)
    return first, layers, _Unit(rest, kept)


def _after_layers(module: Module) -> bool:
    return module.kind in (ModuleKind.FINAL_NORM, ModuleKind.DECODER, ModuleKind.OUTPUT_LAYER)


def _instants(
    forward: tuple[_Unit, list[_Unit], _Unit], backward: tuple[_Unit, list[_Unit], _Unit], *, early: bool
) -> Iterator[Point]:
    f_first, f_layers, f_last = forward
    b_first, b_layers, b_last = backward
    frame: list[Tensor] = []
    yield from _alone(f_first.forward(frame), beside=b_last.after)
    yield from _alone(b_last.backward(), beside=f_first.retained)
    pairs = min(len(f_layers), len(b_layers))
    for one, other in zip(f_layers[:pairs], reversed(b_layers[len(b_layers) - pairs :]), strict=True):
        yield from _layers_together(one, other, frame, early=early)
    kept = f_layers[pairs].before if pairs < len(f_layers) else f_last.before
    for other in reversed(b_layers[: len(b_layers) - pairs]):
        yield from _alone(other.backward(), beside=kept)
    for one in f_layers[pairs:]:
        yield from _alone(one.forward(frame), beside=b_first.retained)
    yield from _alone(f_last.forward(frame), beside=b_first.retained)
    yield from _alone(b_first.backward(), beside=f_last.after)


def _layers_together(forward: _Unit, backward: _Unit, frame: list[Tensor], *, early: bool) -> Iterator[Point]:
    """A layer's forward and another's backward: attention forward, FFN backward, FFN forward, attention backward.

    With `early` the last two in the opposite order. Each computes during the expert communication of the other
    (`TransformerLayerSchedulePlan.run`).
    """
    f_attention, f_experts = _halves(forward.forward(frame))
    b_attention, b_experts = _halves(backward.backward())
    between = f_experts[0].saved if f_experts else forward.after
    yield from _alone(f_attention, beside=backward.after)
    yield from _alone(b_experts, beside=between)
    if early:
        yield from _alone(b_attention, beside=between)
        yield from _alone(f_experts, beside=backward.before)
        return
    yield from _alone(f_experts, beside=b_attention[0].saved if b_attention else backward.before)
    yield from _alone(b_attention, beside=forward.after)


def _halves(placed: Sequence[_Placed]) -> tuple[list[_Placed], list[_Placed]]:
    """Instants of a layer's attention, and those of its FFN or MoE branch."""
    return [each for each in placed if not each.feed_forward], [each for each in placed if each.feed_forward]


def _alone(placed: Sequence[_Placed], *, beside: int) -> Iterator[Point]:
    """Instants of one microbatch, with `beside` bytes saved by the other."""
    for each in placed:
        saved = beside + each.saved
        yield Point(
            block=each.block,
            parent=each.parent,
            instant=each.instant,
            saved=saved,
            bytes=saved + each.instant.temporary + total_bytes(each.frame),
            beside=each.frame,
        )
