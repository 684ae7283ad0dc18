"""Bytes over the forward and the backward of one model chunk, module by module.

A tree of modules says what each saves and needs; walking it in the order of execution gives the bytes that are
alive at the worst instant of every module. Nothing here knows pipelines, optimizers or GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from analyzer.modules.kinds import RESIDUAL_ADDS, ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Point:
    """The worst instant of one module in one pass, in bytes above what was alive before the chunk's forward."""

    phase: Pass
    path: str
    saved: int
    """Kept for backward at that instant."""
    transient: tuple[Tensor, ...]
    """Alive beside it."""
    left: int = 0
    """Of `saved`, what checkpoints behind it have left: `Outliving`."""
    rerun: bool = False
    """In the second forward of a checkpoint."""
    kind: ModuleKind = ModuleKind.OTHER

    @cached_property
    def bytes(self) -> int:
        """All that is alive."""
        return self.saved + total_bytes(self.transient)


@dataclass(frozen=True)
class ChunkTimeline:
    """One chunk's forward and backward."""

    retained: int
    """Bytes that stay between its forward and its backward."""
    forward: tuple[Point, ...]
    backward: tuple[Point, ...]
    first_forward: tuple[Point, ...] = ()
    """Of the first microbatch of all, where it differs from the others."""
    left: int = 0
    """Bytes that its checkpoints leave behind from their backward until they run again, in the next microbatch."""
    left_of_layer: int = 0
    """Of these, what the first of them leaves."""
    left_input: int = 0
    """What the first checkpoint leaves beside, where its input was received and the schedule may name it, too."""

    @cached_property
    def forward_peak(self) -> Point:
        """The fullest instant of the forward."""
        return max(self.forward, key=lambda point: point.bytes)

    @cached_property
    def backward_peak(self) -> Point:
        """The fullest instant of the backward."""
        return max(self.backward, key=lambda point: point.bytes)

    @cached_property
    def next_backward_peak(self) -> Point:
        """The same where the microbatch before left something behind in every layer that has not yet run again."""
        found = max(self.backward, key=lambda point: point.bytes - point.left)
        return replace(found, saved=max(found.saved, found.saved - found.left + self.left - self.left_of_layer))


def timeline(tree: Module, *, first: Module | None = None) -> ChunkTimeline:
    """Both passes of a chunk. `first` is its tree in the first forward of all, where that differs."""
    left = Outliving()
    backward = tuple(backward_points(tree, before=0, path="", around=(), left=left))
    return ChunkTimeline(
        retained=tree.retained_bytes,
        forward=tuple(forward_points(tree, before=0, path="", held=[])),
        backward=backward,
        first_forward=() if first is None else tuple(forward_points(first, before=0, path="", held=[])),
        left=left.bytes,
        left_of_layer=left.of_layer,
        left_input=left.received,
    )


def with_received_gradient(tree: Module, line: ChunkTimeline, gradient: Tensor) -> ChunkTimeline:
    """The same for a chunk that is sent the gradient of its output, which the schedule names until its backward is over.

    In the last branch of the last layer it is the gradient of the residual stream, which is counted there; once the gradient
    of that branch was added to it, the sum is another tensor. Source: `output_tensor_grad` of core/pipeline_parallel/schedules.py.
    """
    points = [
        replace(point, transient=(*point.transient, gradient)) if past else point
        for point, past in _past_branch(_last_branch(tree), line.backward)
    ]
    return replace(line, backward=tuple(points))


def _past_branch(branch: frozenset[str], points: Iterable[Point]) -> Iterator[tuple[Point, bool]]:
    """Each point, and whether the backward has been through `branch` by then."""
    inside = past = False
    for point in points:
        if not point.rerun:
            was, inside = inside, not branch.isdisjoint(point.path.split("."))
            past = past or (was and not inside)
        yield point, past


def _last_branch(tree: Module) -> frozenset[str]:
    """Names of what the backward of the last layer goes through before it comes to a residual connection."""
    layers = [module for _, module in tree.walk() if module.name == "layers" and module.children]
    names: list[str] = []
    for child in reversed(layers[-1].children if layers else ()):
        if names and child.kind in RESIDUAL_ADDS:
            break
        names.append(child.name)
    return frozenset(names)


def _join(path: str, module: Module) -> str:
    return f"{path}.{module.name}" if path else module.name


def forward_points(
    module: Module, *, before: int, path: str, held: list[Tensor], around: tuple[Tensor, ...] = ()
) -> Iterator[Point]:
    """Points of a forward that keeps what backward needs. `held` collects what lives to the end of the chunk's forward."""
    around = (*around, *module.forward_workspace)
    if module.recomputed:
        own = before + total_bytes(module.saved)
        for child in module.children:
            yield from _without_gradients(child, before=own, path=_join(path, module), held=held, around=around)
        return
    here = before + total_bytes(module.saved)
    held.extend(module.forward_held)
    if not module.children:
        yield Point("forward", _join(path, module), here, (*module.offloaded, *around, *held), kind=module.kind)
    for child in module.children:
        yield from forward_points(child, before=here, path=_join(path, module), held=held, around=around)
        here += child.retained_bytes


def _without_gradients(
    module: Module, *, before: int, path: str, held: list[Tensor], around: tuple[Tensor, ...]
) -> Iterator[Point]:
    """Points of the first forward under a checkpoint: what a module would save lives only while it runs."""
    around = (*around, *module.forward_workspace)
    if not module.children:
        yield Point("forward", _join(path, module), before, (*module.saved, *module.offloaded, *around, *held), kind=module.kind)
    for child in module.children:
        yield from _without_gradients(child, before=before, path=_join(path, module), held=held, around=around)


@dataclass
class Outliving:
    """Bytes that checkpoints have left behind so far in a backward: `Module.outlives`, and inputs that linger."""

    bytes: int = 0
    last: int = 0
    """Of these, what the last layer left behind beside its input: the gradient that comes to the one before it."""
    of_layer: int = 0
    """What the last checkpoint left."""
    received: int = 0
    """The input of that, where it was received."""


def backward_points(
    module: Module, *, before: int, path: str, around: tuple[Tensor, ...], left: Outliving | None = None
) -> Iterator[Point]:
    """Points of the backward, last module first. `before` is what everything earlier in the chunk keeps.

    A checkpointed module runs its forward again first; then its children go backward as any others. `left` counts what
    outlives it.
    """
    left = Outliving() if left is None else left
    if module.recomputed and (module.outlives or any(tensor.lingers for tensor in module.saved)):
        yield from _left_behind(module, before=before, path=path, around=around, left=left)
        return
    yield from _points_of_backward(module, before=before, path=path, around=around, left=left)


def _left_behind(module: Module, *, before: int, path: str, around: tuple[Tensor, ...], left: Outliving) -> Iterator[Point]:
    """As `backward_points`, of a checkpoint that leaves its input and the gradient of it behind.

    The gradient that the layer after it left is that of the residual stream, which its last branch counts.
    """
    branch = _last_branch(module)
    shared, left.last = left.last, 0
    left.bytes -= shared
    for point, past in _past_branch(branch, _points_of_backward(module, before=before, path=path, around=around, left=left)):
        yield replace(point, saved=point.saved + shared, left=point.left + shared) if past else point
    gradient = total_bytes(module.outlives)
    left.of_layer = gradient + sum(tensor.bytes for tensor in module.saved if tensor.lingers)
    left.received = 0 if not branch or any(tensor.lingers for tensor in module.saved) else total_bytes(module.saved)
    left.bytes += shared + left.of_layer
    left.last = gradient if branch else 0


def _points_of_backward(module: Module, *, before: int, path: str, around: tuple[Tensor, ...], left: Outliving) -> Iterator[Point]:
    here = before + total_bytes(module.saved)
    around = (*around, *module.backward_workspace) if module.children else around
    if not module.children:
        yield Point(
            "backward",
            _join(path, module),
            here + left.bytes,
            (*module.offloaded, *module.backward_workspace, *around),
            left.bytes,
            kind=module.kind,
        )
        return
    starts = []
    for child in module.children:
        starts.append(here)
        if module.recomputed:
            for point in forward_points(child, before=here, path=_join(path, module), held=[]):
                yield Point(
                    "backward",
                    point.path,
                    point.saved + left.bytes,
                    (*point.transient, *around),
                    left.bytes,
                    rerun=True,
                    kind=point.kind,
                )
        here += child.retained_bytes
    for child, start in zip(reversed(module.children), reversed(starts), strict=True):
        yield from backward_points(child, before=start, path=_join(path, module), around=around, left=left)
