"""Workspaces and caches that the modules of the first iteration allocate."""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.memory.block_memory import Instant, explained
from analyzer.memory.workspaces import Workspace
from analyzer.modules.norm import PARTIAL_SUMS
from analyzer.modules.tree import Module


class FirstUses:
    """The workspaces of a rank. Each is allocated when a module that uses it runs for the first time."""

    def __init__(self, workspaces: Sequence[Workspace], *, warm: bool) -> None:
        """`warm`: an iteration has run before, in which all were allocated."""
        self.bytes = sum(each.bytes for each in workspaces if warm or not each.kinds)
        """Bytes of the allocated workspaces."""
        self._used_at: dict[str, int] = {}
        """By name of a workspace of several blocks: the number of the instant at which the first repetition of the current block
        allocated its part; -1 after the last repetition."""
        self._left: dict[str, int] = {}
        """By name of the same: how many blocks have not allocated their part."""
        self._times = 1
        self._remaining = [] if warm else [each for each in workspaces if each.kinds]

    def remain(self, phase: str) -> bool:
        """Whether workspaces of the "forward" or "backward" are still to be allocated."""
        return any(each.phase == phase for each in self._remaining)

    def start(self, times: int) -> None:
        """The first and the last of so many repetitions of a block are visited next."""
        self._used_at.clear()
        self._times = times

    def allocate(self, block: Module, instant: Instant) -> int:
        """Allocates those that are used for the first time at an instant of a block. Returns bytes that are freed before."""
        if not self._remaining:
            return 0
        phase = "backward" if instant.backward else "forward"
        waiting = (each for each in self._remaining if each.recomputed or not instant.recomputed)
        using = (each for each in waiting if each.phase == phase and instant.kind in each.kinds)
        found = [each for each in using if not each.weight or each.weight == instant.weight]
        for each in found:
            self._take(each, instant.number)
        dummies = sum(each.bytes for each in found if each.weight)
        if not dummies:
            return 0
        _, temporary = explained(block, instant)
        return min(dummies, sum(each.bytes for each in temporary if each.name == PARTIAL_SUMS))

    def _take(self, used: Workspace, number: int) -> None:
        """Allocates a workspace, or the parts of it that the repetitions of a block up to this one allocate, at an instant."""
        if used.blocks == 1:
            self._remaining.remove(used)
            self.bytes += used.bytes
            return
        left = self._left.get(used.name, used.blocks)
        count = min(left, self._first_runs(used.name, number))
        self._left[used.name] = left - count
        self.bytes += count * used.bytes // used.blocks
        if count == left:
            self._remaining.remove(used)

    def _first_runs(self, name: str, number: int) -> int:
        """How many repetitions of the current block use a workspace of several blocks for the first time at an instant."""
        first = self._used_at.get(name)
        if first is not None and number > first:  # a later instant of a repetition that has allocated its part
            return 0
        self._used_at[name] = number if first is None else -1
        return 1 if first is None else self._times - 1

    def _rest(self, each: Workspace) -> int:
        """Bytes of a remaining workspace that are not allocated."""
        return self._left.get(each.name, each.blocks) * each.bytes // each.blocks if each.blocks > 1 else each.bytes

    def allocate_all(self) -> None:
        """Allocates all that forwards and backwards use."""
        self.bytes += sum(self._rest(each) for each in self._remaining if each.phase != "optimizer")
        self._remaining = [each for each in self._remaining if each.phase == "optimizer"]
