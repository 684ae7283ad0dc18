"""Sums over the tree of modules, and runs of equal siblings, for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analyzer.modules.tree import Module


def parameters(module: Module) -> int:
    """Elements of the weights of a module and its descendants on one rank."""
    if module.repeats:
        return 0
    return sum(p.numel for p in module.parameters) + sum(map(parameters, module.children))


class Run(NamedTuple):
    """Consecutive equal siblings, such as the layers of a transformer, represented by the first one."""

    module: Module
    length: int
    name: str
    """Siblings with the same name are numbered as in torch: 'layers.0', and 'layers.0–31' for a run."""


def runs(children: Sequence[Module]) -> Iterator[Run]:
    """Children, with consecutive equal ones as one run."""
    names = Counter(child.name for child in children)
    seen: Counter[str] = Counter()
    labels = []
    for child in children:
        labels.append(f"{child.name}.{seen[child.name]}" if names[child.name] > 1 else child.name)
        seen[child.name] += 1
    start = 0
    for end in range(1, len(children) + 1):
        if end < len(children) and children[start] == children[end]:
            continue
        name = labels[start] if end - start == 1 else f"{labels[start]}–{labels[end - 1].rpartition('.')[2]}"
        yield Run(children[start], end - start, name)
        start = end
