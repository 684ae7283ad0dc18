"""A forward of one microbatch side by side with the backward of another (`--overlap-moe-expert-parallel-comm`).

Layer by layer, first with last: the messages of the experts of the one run while the other computes. What the forward
keeps grows as what the backward has kept shrinks.

Source: core/models/common/model_chunk_schedule_plan.py `TransformerModelChunkSchedulePlan.run` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analyzer.memory.passes import Point, backward_points, forward_points
from analyzer.modules.tree import Module, Tensor


@dataclass(frozen=True)
class _Unit:
    """A layer, or everything before the layers, or after them."""

    modules: tuple[Module, ...]
    before: int
    """Bytes that the units before it keep."""
    path: str

    @property
    def retained(self) -> int:
        return sum(module.retained_bytes for module in self.modules)

    def forward(self, held: list[Tensor]) -> list[Point]:
        """Instants of its forward, beside what the units before it keep. `held` lives to the end of the chunk's forward."""
        points: list[Point] = []
        here = self.before
        for module in self.modules:
            points += forward_points(module, before=here, path=self.path, held=held)
            here += module.retained_bytes
        return points

    def backward(self) -> list[Point]:
        """Instants of its backward."""
        points: list[Point] = []
        here = self.before
        for module in self.modules:
            points += backward_points(module, before=here, path=self.path, around=())
            here += module.retained_bytes
        return points


def side_by_side(forward: Module, backward: Module, *, early: bool = False) -> Point:
    """The fullest instant of a forward through one chunk and a backward through another, of two microbatches.

    `saved` and `bytes` are of both, above what is alive beside them. `early`: attention goes backward before the other one's
    experts run, not after.
    """
    return max(_instants(_units(forward), _units(backward), early=early), key=lambda point: point.bytes)


def _units(tree: Module) -> tuple[_Unit, list[_Unit], _Unit]:
    """Everything before the layers, the layers, everything after them."""
    names = [child.name for child in tree.children]
    position = names.index("decoder")
    decoder = tree.children[position]
    layers = [child for child in decoder.children if child.name == "layers"]
    rest = [child for child in decoder.children if child.name != "layers"]
    after = [*rest, *tree.children[position + 1 :]]
    kept = 0
    first = _Unit(tree.children[:position], kept, tree.name)
    kept += first.retained
    units = []
    for layer in layers:
        units.append(_Unit((layer,), kept, f"{tree.name}.decoder"))
        kept += layer.retained_bytes
    for block in [module for module in after if module.name == "mtp"]:
        units.append(_Unit((block,), kept, tree.name))
        kept += block.retained_bytes
    return first, units, _Unit(tuple(module for module in after if module.name != "mtp"), kept, tree.name)


def _instants(
    forward: tuple[_Unit, list[_Unit], _Unit], backward: tuple[_Unit, list[_Unit], _Unit], *, early: bool
) -> Iterator[Point]:
    f_first, f_layers, f_last = forward
    b_first, b_layers, b_last = backward
    everything = b_last.before + b_last.retained
    held: list[Tensor] = []
    yield from _alone(f_first.forward(held), beside=everything)
    yield from _alone(b_last.backward(), beside=f_first.retained)
    pairs = min(len(f_layers), len(b_layers))
    for one, other in zip(f_layers[:pairs], reversed(b_layers[len(b_layers) - pairs :]), strict=True):
        yield from _layers_together(one, other, held, early=early)
    kept = f_layers[pairs].before if pairs < len(f_layers) else f_last.before
    for other in reversed(b_layers[: len(b_layers) - pairs]):
        yield from _alone(other.backward(), beside=kept)
    for one in f_layers[pairs:]:
        yield from _alone(one.forward(held), beside=b_first.retained)
    yield from _alone(f_last.forward(held), beside=b_first.retained)
    yield from _alone(b_first.backward(), beside=f_last.before + f_last.retained)


def _layers_together(forward: _Unit, backward: _Unit, held: list[Tensor], *, early: bool) -> Iterator[Point]:
    """A layer's forward and another's backward: attention forward, feed-forward backward, feed-forward forward, attention
    backward, the last two the other way round where `early`. Each computes while the other's experts send
    (`TransformerLayerSchedulePlan.run`)."""
    ahead, back = forward.forward(held), backward.backward()
    f_attention, f_experts = _halves(ahead)
    b_attention, b_experts = _halves(back)
    between = f_experts[0].saved if f_experts else forward.before + forward.retained
    yield from _alone(f_attention, beside=backward.before + backward.retained)
    yield from _alone(b_experts, beside=between)
    if early:
        yield from _alone(b_attention, beside=between)
        yield from _alone(f_experts, beside=backward.before)
        return
    yield from _alone(f_experts, beside=b_attention[0].saved if b_attention else backward.before)
    yield from _alone(b_attention, beside=forward.before + forward.retained)


def _halves(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Instants of a layer's attention, and those of its feed-forward block with the norm before it."""
    experts = [point for point in points if {"pre_mlp_layernorm", "mlp", "mlp_bda"}.intersection(point.path.split("."))]
    return [point for point in points if point not in experts], experts


def _alone(points: Sequence[Point], *, beside: int) -> Iterator[Point]:
    """Instants of what runs, with `beside` bytes kept by what does not."""
    for point in points:
        yield Point(point.phase, point.path, beside + point.saved, point.transient)
