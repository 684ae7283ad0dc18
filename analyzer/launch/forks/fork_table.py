"""The options of known forks of Megatron-LM that Megatron-LM lacks. Loaded only if a launch has an option that the catalogue lacks.

`fork_options.json` has one row for each option, from the parsers of the forks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from analyzer.launch.options.option_table import Option

Effect = Literal["modelled", "none", "not counted", "withheld", "refused"]
"""modelled: `translate` reads it as Megatron options. none: neither memory nor communication changes. withheld: there can be no
verdict with it. refused: it selects a model that is not a GPT."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork of Megatron-LM, or a project that adds options to it."""

    key: str
    name: str
    """For messages: 'Megatron-DeepSpeed (Microsoft)'."""
    repository: str
    """Owner and name on GitHub."""
    base: str
    """The Megatron-LM release that its code is based on: '0.12', or '2023' for the code of August 2023 and older code."""


@dataclass(frozen=True, slots=True)
class ForkOption:
    """An option of forks."""

    flag: str
    forks: tuple[str, ...]
    """Keys of the forks that have it."""
    nargs: int | str
    """Number of values: 0 for a flag, 1, 2, '?', '*' or '+'."""
    effect: Effect
    note: str
    """none and refused: the reason. not counted: a fragment of a sentence about the error of the prediction.
    withheld: a predicate of the option."""
    words: str
    """modelled: Megatron's words, with {0} for the value; empty if `translate` has a function for the option."""


@dataclass(frozen=True, slots=True)
class ForkValue:
    """A value of one of Megatron's own options that only forks accept."""

    flag: str
    value: str
    """The value; with a trailing '*', its beginning."""
    forks: tuple[str, ...]
    replacement: str
    """The value in Megatron's terms; empty if the option is left out."""
    effect: Effect
    note: str
    """As in `ForkOption`."""

    def fits(self, value: str) -> bool:
        """Whether the row is about `value`."""
        return value.startswith(self.value[:-1]) if self.value.endswith("*") else value == self.value


@dataclass(frozen=True, slots=True)
class ForkTable:
    """All known forks and their options."""

    forks: Mapping[str, Fork]
    """By key."""
    options: Mapping[str, ForkOption]
    """By flag."""
    prefixes: tuple[ForkOption, ...]
    """Rows for all options that start with `flag`; used for an option without a row of its own."""
    values: tuple[ForkValue, ...]

    def find(self, flag: str, known: Mapping[str, Option]) -> ForkOption | None:
        """The option `flag` of a fork, or None. `known` are the options of Megatron-LM by flag.

        A flag with underscores whose dashed spelling is one of `known`, or whose name is the dest of one, is modelled as that.
        """
        if flag in self.options:
            return self.options[flag]
        if "_" in flag and megatron_flag(flag, known) is not None:
            return _underscored(flag, known)
        row = self.options.get(other_spelling(flag))
        if row is not None:
            return ForkOption(flag, row.forks, row.nargs, row.effect, row.note, row.words)
        near = [each for each in self.prefixes if flag.startswith(each.flag)]
        if not near:
            return None
        row = max(near, key=lambda each: len(each.flag))
        return ForkOption(flag, row.forks, row.nargs, row.effect, row.note, row.words)

    def find_value(self, flag: str, value: str) -> ForkValue | None:
        """The row about `value` of Megatron's option `flag`, or None."""
        return next((row for row in self.values if row.flag == flag and row.fits(value)), None)


def other_spelling(flag: str) -> str:
    """The flag with dashes in the place of underscores, or the other way round. Projects write the same option in both ways."""
    name = flag.lstrip("-")
    return "--" + (name.replace("_", "-") if "_" in name else name.replace("-", "_"))


def megatron_flag(flag: str, known: Mapping[str, Option]) -> str | None:
    """Megatron's flag for a flag that is spelled with underscores: the dashed one, or one whose dest has this name."""
    dashed = flag.replace("_", "-")
    if dashed in known:
        return dashed
    dest = flag.lstrip("-").replace("-", "_")
    return next((name for name, option in known.items() if option.dest == dest), None)


def _underscored(flag: str, known: Mapping[str, Option]) -> ForkOption:
    option = known[megatron_flag(flag, known) or flag]
    nargs: int | str = "?" if option.kind != "store" else 1 if option.nargs is None else option.nargs
    return ForkOption(flag, ("epfllm", "ms-swift"), nargs, "modelled", "", "")


@cache
def load_fork_options() -> ForkTable:
    """Loads the table of this package."""
    content = json.loads(Path(__file__).with_name("fork_options.json").read_bytes())
    options = {row[0]: _option(row) for row in content["options"]}
    values = (ForkValue(row[0], row[1], tuple(row[2].split()), row[3], row[4], row[5]) for row in content["values"])
    return ForkTable(
        MappingProxyType({key: Fork(key, *fields) for key, fields in content["forks"].items()}),
        MappingProxyType(options),
        tuple(_option(row) for row in content["prefixes"]),
        tuple(values),
    )


def _option(row: list[str]) -> ForkOption:
    flag, forks, nargs, effect, note, words = row
    return ForkOption(flag, tuple(forks.split()), nargs, effect, note, words)  # type: ignore[arg-type]
