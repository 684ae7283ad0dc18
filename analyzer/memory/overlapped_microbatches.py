"""The forward of one microbatch overlapped with the backward of another (`--overlap-moe-expert-parallel-comm`).

Layers are paired: the first layer of the forward with the last layer of the backward, and so on. The expert communication of one
runs while the other computes. The saved bytes of the forward grow while those of the backward shrink.

Source: core/models/common/model_chunk_schedule_plan.py `TransformerModelChunkSchedulePlan.run` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from analyzer.memory.block_memory import Instant, block_memory, branch_of, explained
from analyzer.memory.chunk_memory import Point
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import STREAM, Module, Tensor, total_bytes
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

    @property
    def frame(self) -> tuple[Tensor, ...]:
        """The tensors that it leaves in local variables; the state of a chunk references them until its backward ends."""
        return tuple(tensor for module, _ in self.modules for tensor in block_memory(module).frame)

    @property
    def stream(self) -> tuple[Tensor, ...]:
        """The input of a layer."""
        return tuple(
            replace(tensor, lingers=False) for tensor in _saved(self.modules) if tensor.made_in == STREAM and tensor.bytes
        )[:1]

    @property
    def sent(self) -> tuple[Tensor, ...]:
        """The tokens that a layer sends to the experts."""
        experts = (child for module, _ in self.modules for _, child in module.walk() if child.kind is ModuleKind.EXPERTS)
        return tuple(tensor for child in experts for each in child.children[:1] for tensor in each.saved if tensor.name == "input")

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


def _saved(modules: Sequence[tuple[Module, str]]) -> Iterator[Tensor]:
    for module, _ in modules:
        for _, child in module.walk():
            yield from child.saved


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
    instants = _instants(_units(forward), _units(backward), early=early, same=forward is backward)
    return max(instants, key=lambda point: point.bytes)


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
    forward: tuple[_Unit, list[_Unit], _Unit], backward: tuple[_Unit, list[_Unit], _Unit], *, early: bool, same: bool
) -> Iterator[Point]:
    """`same`: both microbatches are in the same chunk."""
    f_first, f_layers, f_last = forward
    b_first, b_layers, b_last = backward
    frame: list[Tensor] = []
    batch = b_first.frame
    yield from _one_microbatch(f_first.forward(frame), other_saved=b_last.after, held=batch)
    yield from _one_microbatch(b_last.backward(), other_saved=f_first.retained, held=(*batch, *frame))
    pairs = min(len(f_layers), len(b_layers))
    done: tuple[Tensor, ...] = ()
    for index, (one, other) in enumerate(zip(f_layers[:pairs], reversed(b_layers[len(b_layers) - pairs :]), strict=True)):
        left = done if not same else done[: 2 * max(0, min(index, len(b_layers) - 1 - index))]
        yield from _paired_layers(one, other, frame, early=early, held=(*batch, *left, *other.stream))
        done = (*done, *other.stream, *other.stream)
    kept = f_layers[pairs].before if pairs < len(f_layers) else f_last.before
    ends = (*batch, *(() if same else done), *b_layers[0].stream, *b_layers[0].stream) if b_layers else batch
    for other in reversed(b_layers[: len(b_layers) - pairs]):
        yield from _one_microbatch(other.backward(), other_saved=kept, held=(*ends, *frame))
    for one in f_layers[pairs:]:
        yield from _one_microbatch(one.forward(frame), other_saved=b_first.retained, held=ends)
    before_loss = tuple(frame)
    yield from _one_microbatch(f_last.forward(frame), other_saved=b_first.retained, held=ends)
    yield from _one_microbatch(b_first.backward(), other_saved=f_last.after, held=(*ends, *before_loss))


def _paired_layers(
    forward: _Unit, backward: _Unit, frame: list[Tensor], *, early: bool, held: tuple[Tensor, ...]
) -> Iterator[Point]:
    """The forward of one layer and the backward of another: attention forward, FFN backward, FFN forward, attention backward.

    With `early` the last two are in the opposite order. Each microbatch computes during the expert communication of the other one
    (`TransformerLayerSchedulePlan.run`). The tokens that the forward sends next, and the gradient that the backward of the
    experts got, are local variables during that backward.
    """
    f_attention, f_experts = _halves(forward.forward(frame))
    b_attention, b_experts = _halves(backward.backward())
    between = f_experts[0].saved if f_experts else forward.after
    yield from _one_microbatch(f_attention, other_saved=backward.after, held=held)
    local = (*frame, *forward.sent, *backward.sent)
    yield from _one_microbatch(b_experts, other_saved=between, held=(*held, *local))
    if early:
        yield from _one_microbatch(b_attention, other_saved=between, held=(*held, *frame, *forward.sent))
        yield from _one_microbatch(f_experts, other_saved=backward.before, held=held)
        return
    yield from _one_microbatch(f_experts, other_saved=b_attention[0].saved if b_attention else backward.before, held=held)
    yield from _one_microbatch(b_attention, other_saved=forward.after, held=(*held, *frame))


def _halves(placed: Sequence[_Placed]) -> tuple[list[_Placed], list[_Placed]]:
    """Instants of a layer's attention, and instants of its FFN or MoE branch."""
    return [each for each in placed if not each.feed_forward], [each for each in placed if each.feed_forward]


def _one_microbatch(placed: Sequence[_Placed], *, other_saved: int, held: tuple[Tensor, ...]) -> Iterator[Point]:
    """Instants of one microbatch. The other one has saved `other_saved` bytes; the schedule or modules reference `held`."""
    for each in placed:
        saved = other_saved + each.saved
        outside = (*each.frame, *held)
        yield Point(
            block=each.block,
            parent=each.parent,
            instant=each.instant,
            saved=saved,
            bytes=saved + each.instant.temporary + total_bytes(outside),
            outside=outside,
        )
