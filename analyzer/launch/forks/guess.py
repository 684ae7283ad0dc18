"""The fork that a launch is for, from the options that Megatron-LM lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from analyzer.launch.forks.fork_table import Fork, ForkTable, load_fork_options
from analyzer.launch.options.catalogue import load_catalogue

_MOST_NAMED = 3
"""Options that the reason names."""


@dataclass(frozen=True, slots=True)
class ForkGuess:
    """The fork that has most of the unknown options of a launch."""

    fork: Fork
    reason: str
    """A sentence."""


def guess_fork(flags: Iterable[str]) -> ForkGuess | None:
    """The fork that has most of the `flags`; None if no fork has one. Of two with equally many, the one with fewer options."""
    table = load_fork_options()
    unknown = sorted(set(flags))
    keys = rank_forks(unknown, table)
    if not keys:
        return None
    fork = table.forks[keys[0]]
    own = [flag for flag in unknown if fork.key in forks_of(flag, table)]
    named = ", ".join(own[:_MOST_NAMED])
    more = f" and {len(own) - _MOST_NAMED} more" if len(own) > _MOST_NAMED else ""
    return ForkGuess(fork, f"{named}{more} {'is an option' if len(own) == 1 else 'are options'} of {fork.name}.")


def rank_forks(flags: Iterable[str], table: ForkTable) -> list[str]:
    """Keys of the forks that have one of the `flags`, the most likely first. Options of fewer forks count more."""
    points: Counter[str] = Counter()
    for flag in flags:
        forks = forks_of(flag, table)
        for key in forks:
            points[key] += 60 // len(forks)
    sizes = Counter(key for option in table.options.values() for key in option.forks)
    return sorted(points, key=lambda key: (-points[key], sizes[key], key))


def forks_of(flag: str, table: ForkTable) -> tuple[str, ...]:
    """Keys of the forks that have the option."""
    option = table.find(flag, load_catalogue().newest)
    return option.forks if option else ()
