"""The options of one Megatron-LM parser, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option, with the fields of an argparse action."""

    flags: Sequence[str]
    dest: str
    kind: str
    """store, true, false, or boolean (a flag with a `--no-` form)."""
    nargs: int | str | None = None
    const: object = None
    default: object = None
    type: str | None = None
    """Name of the function that converts a word; None for no conversion."""
    choices: Sequence[object] | None = None


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of one Megatron-LM release or checkout."""

    release: str
    """'0.16.1', or '2023' for the code before core 0.3."""
    source: str
    """The source of the table, for messages: 'catalogue of Megatron-LM core 0.16.1'."""
    options: Mapping[str, Option]
    """By flag."""
    defaults: Mapping[str, object]
    """By dest."""


def make_table(options: Iterable[Option], *, release: str, source: str) -> OptionTable:
    """The table of `options`. As in argparse, the first option of a dest gives its default, and the last option of a flag wins."""
    by_flag: dict[str, Option] = {}
    defaults: dict[str, object] = {}
    for option in options:
        for flag in option.flags:
            by_flag[flag] = option
        if option.dest not in defaults:
            defaults[option.dest] = frozen(option.default)
    return OptionTable(release, source, MappingProxyType(by_flag), MappingProxyType(defaults))


def frozen(value: Any) -> Any:
    """`value` with lists as tuples."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
