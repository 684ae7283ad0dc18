"""Workspaces of the pieces of a tree, which FSDP adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from analyzer.modules.tree import Module, Tensor


class Workspaces(NamedTuple):
    """What is unsharded while a module runs."""

    forward: tuple[Tensor, ...]
    backward: tuple[Tensor, ...]
    recompute: tuple[Tensor, ...] | None = None
    """In the forward that a checkpoint runs again; None if equal to `forward`."""


def with_workspaces(
    tree: Module,
    workspaces: Sequence[Workspaces],
    is_piece: Callable[[Module], bool],
    has_pieces: Callable[[Module], bool] = lambda _: False,
) -> Module:
    """The tree with workspaces added to its pieces, in the order of execution; `has_pieces`: pieces that contain other pieces.

    Layers that are one object and get equal workspaces stay one object, so that they are analysed once.
    """
    numbers: dict[Workspaces, int] = {}
    listed = tuple(numbers.setdefault(each, len(numbers)) for each in workspaces)
    distinct = tuple(numbers)
    pieces: dict[int, int] = {}
    done: dict[tuple[int, tuple[int, ...]], Module] = {}

    def count(module: Module) -> int:
        if id(module) not in pieces:
            inside = not is_piece(module) or has_pieces(module)
            pieces[id(module)] = int(is_piece(module)) + (sum(map(count, module.children)) if inside else 0)
        return pieces[id(module)]

    def changed(module: Module, own: tuple[int, ...]) -> Module:
        added = distinct[own[0]] if is_piece(module) else Workspaces((), ())
        again = module.recompute_workspace
        if is_piece(module) and (added.recompute is not None or again is not None):
            before = module.forward_workspace if again is None else again
            again = (*before, *(added.forward if added.recompute is None else added.recompute))
        children, position = module.children, int(is_piece(module))
        if position < len(own):
            ends = tuple(accumulate(map(count, children), initial=position))
            children = tuple(visit(child, own[start:end]) for child, (start, end) in zip(children, pairwise(ends), strict=True))
        return replace(
            module,
            forward_workspace=(*module.forward_workspace, *added.forward),
            recompute_workspace=again,
            backward_workspace=(*module.backward_workspace, *added.backward),
            children=children,
        )

    def visit(module: Module, own: tuple[int, ...]) -> Module:
        if not own:
            return module
        key = (id(module), own)
        if key not in done:
            done[key] = changed(module, own)
        return done[key]

    return visit(tree, listed)
