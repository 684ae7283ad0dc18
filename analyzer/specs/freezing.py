"""Parameters of a language model that are not trained, chosen by their names."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class FreezeSpec:
    """What is frozen, and what of that is trained after all. Names are those of `named_parameters` of a chunk of the model.

    Source: `freeze_parameters` and `activate_parameters` of swift/utils/transformers_utils.py (ms-swift 4.6).
    """

    prefixes: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression that is searched in names; empty for none. An invalid one has no effect."""
    ratio: float = 0.0
    """The part of the parameters of a rank, from the first one on, that is frozen."""
    trained_prefixes: tuple[str, ...] = ()
    trained_pattern: str = ""

    def frozen(self, parameters: Sequence[tuple[str, int]]) -> frozenset[str]:
        """The names of the frozen ones of the parameters of a chunk, which are given in order with their numbers of elements."""
        sizes = [*accumulate(numel for _, numel in parameters)]
        first = bisect_right(sizes, int(sizes[-1] * self.ratio)) if self.ratio > 0 and sizes else 0
        names = [name for name, _ in parameters]
        found = {*names[:first], *_chosen(names, self.prefixes, self.pattern)}
        return frozenset(found - _chosen(names, self.trained_prefixes, self.trained_pattern))

    @property
    def words(self) -> tuple[str, ...]:
        """All prefixes and patterns."""
        given = (*self.prefixes, self.pattern, *self.trained_prefixes, self.trained_pattern)
        return tuple(each for each in given if each)


def _chosen(names: Sequence[str], prefixes: tuple[str, ...], pattern: str) -> set[str]:
    found = {name for name in names if name.startswith(prefixes)} if prefixes else set()
    try:
        return found | ({name for name in names if re.search(pattern, name)} if pattern else set())
    except re.error:
        return found
