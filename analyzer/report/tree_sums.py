"""Sums and runs over the tree of modules, for the reports that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analyzer.modules.tree import Module


def parameters(module: Module) -> int:
    """Elements of the weights of a module and all below it, as one rank holds them."""
    return sum(p.numel for p in module.parameters) + sum(map(parameters, module.children))


def saved_bytes(module: Module) -> int:
    """What a module and all below it keep from forward to backward for one microbatch.

    Below a recomputed module nothing stays but what it keeps itself.
    """
    below = 0 if module.recomputed else sum(map(saved_bytes, module.children))
    return sum(tensor.bytes for tensor in module.saved) + below


class Run(NamedTuple):
    """Siblings in a row that are alike, as the layers of a transformer are, by the first of them."""

    module: Module
    length: int
    name: str
    """Siblings of one name are numbered as torch does: 'layers.0', and 'layers.0–31' for a run of them."""


def runs(children: Sequence[Module], *, whole: bool = False) -> Iterator[Run]:
    """Children with those alike put together; each alone where `whole`."""
    names = Counter(child.name for child in children)
    seen: Counter[str] = Counter()
    labels = []
    for child in children:
        labels.append(f"{child.name}.{seen[child.name]}" if names[child.name] > 1 else child.name)
        seen[child.name] += 1
    start = 0
    for end in range(1, len(children) + 1):
        if end < len(children) and not whole and children[start] == children[end]:
            continue
        name = labels[start] if end - start == 1 else f"{labels[start]}–{labels[end - 1].rpartition('.')[2]}"
        yield Run(children[start], end - start, name)
        start = end
