"""`--info-set` and `--info-unset`: other options than those of the launch, without a change of its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.argv_parser import operands_of
from analyzer.launch.info_options import UNSET

if TYPE_CHECKING:
    from analyzer.launch.info_options import InfoOptions
    from analyzer.launch.options.option_table import Option


def changed_words(words: Sequence[str], info: InfoOptions, known: Mapping[str, Option]) -> tuple[str, ...]:
    """Megatron's words without the options of `--info-unset`, and with those of `--info-set` at the end, where they replace others.

    Raises InputError for an option to leave out that is not among the words.
    """
    flags = ["--" + name.lstrip("-") for name in info.unset]
    return (*without_options(words, flags, known), *info.set)


def without_options(words: Sequence[str], flags: Sequence[str], known: Mapping[str, Option]) -> tuple[str, ...]:
    """Megatron's words without some options and their values. Raises InputError for an option that is not among them."""
    rest = list(words)
    kept: list[str] = []
    found: set[str] = set()
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        operands = operands_of(known[flag], rest) if flag in known and not equals else []
        del rest[: len(operands)]
        if flag in flags:
            found.add(flag)
        else:
            kept += [word, *operands]
    missing = [flag for flag in flags if flag not in found]
    if missing:
        raise InputError(UNSET, f"{missing[0]} is not an option of the launch", "name options that the launch has")
    return tuple(kept)
