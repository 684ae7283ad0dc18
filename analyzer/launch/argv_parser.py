"""Reads Megatron's part of a command line as argparse with allow_abbrev=False would, from a table of options.

By hand, because building a parser of 650 options takes longer than all the rest of this program. Semantics are those
of CPython's argparse: an option takes words up to the next option, `--option=value` gives one, the last of several wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.errors import InputError
from analyzer.launch.options.option_table import Option, OptionTable
from analyzer.launch.options.option_values import Refused, convert


@dataclass(frozen=True, slots=True)
class Reading:
    """What the words said: dest -> value, and dest -> flag as written."""

    values: dict[str, object]
    spelled: dict[str, str]


def read_words(words: Sequence[str], table: OptionTable) -> Reading:
    """The values that `words` give to options of `table`, all of whose flags it knows. Raises InputError."""
    values: dict[str, object] = {}
    spelled: dict[str, str] = {}
    position = 0
    owner: str | None = None
    while position < len(words):
        flag, equals, attached = words[position].partition("=")
        position += 1
        option = table.options.get(flag) if is_option(flag) else None
        if option is None:
            raise _stray(words[position - 1], owner=owner)
        owner = flag
        if equals:
            operands = [attached]
        else:
            operands = operands_of(option, words[position:])
            position += len(operands)
        values[option.dest] = _value(option, flag, operands, attached=bool(equals))
        spelled[option.dest] = flag
    return Reading(values, spelled)


def is_option(word: str) -> bool:
    """Whether argparse takes `word` for an option: it starts with a dash, and is no number and no text with spaces."""
    if not word.startswith("-") or word == "-":
        return False
    return " " not in word and not _is_number(word)


def operands_of(option: Option, following: Sequence[str]) -> list[str]:
    """The words after a flag that belong to it."""
    if option.kind != "store":
        return []
    most = {None: 1, "?": 1, "*": len(following), "+": len(following)}
    limit = option.nargs if isinstance(option.nargs, int) else most[option.nargs]
    taken: list[str] = []
    for word in following[:limit]:
        if is_option(word):
            break
        taken.append(word)
    return taken


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(option: Option, flag: str, operands: list[str], *, attached: bool) -> object:
    """The value that `operands` give, checked for number, type and choice."""
    if option.kind != "store":
        if attached:
            raise InputError(flag, f"takes no value, and got {operands[0]!r}", f"write {flag} alone, or leave it out")
        return not flag.startswith("--no-") if option.kind == "boolean" else option.const
    least = {None: 1, "+": 1, "*": 0, "?": 0}
    wanted = option.nargs if isinstance(option.nargs, int) else least[option.nargs]
    if len(operands) < wanted:
        if wanted == 1:
            raise InputError(flag, "has no value", _example(option, flag))
        raise InputError(flag, f"wants {wanted} values and got {len(operands)}", f"write {flag} with {wanted} values")
    if option.nargs == "?" and not operands:
        return option.const
    converted = tuple(_converted(option, flag, word) for word in operands)
    return converted[0] if option.nargs in (None, "?") else converted


def _example(option: Option, flag: str) -> str:
    if option.choices:
        return f"write {flag} {_listed(option.choices)}"
    sample = {"int": "8", "float": "0.1"}.get(option.type or "str", "VALUE")
    return f"write {flag} {sample}" if sample != "VALUE" else f"write {flag} VALUE, or leave it out"


def _converted(option: Option, flag: str, word: str) -> object:
    try:
        value = convert(word, "exit_signal" if option.dest == "exit_signal" else option.type)
    except Refused as error:
        raise InputError(flag, error.fault, error.remedy) from None
    if option.choices is not None and value not in option.choices:
        raise InputError(flag, f"{word!r} is not a choice", f"use {_listed(option.choices)}")
    return value


def _listed(choices: Sequence[object]) -> str:
    *most, last = [str(choice) for choice in choices if choice is not None]
    return f"{', '.join(most)} or {last}" if most else last


def _stray(word: str, *, owner: str | None) -> InputError:
    """The error for a word that belongs to no option; `owner` is the last option in front of it."""
    if word.startswith("-") and " " in word:
        return InputError(word.split()[0], f"{word!r} is one word to the shell", "take the quotes away")
    remedy = "remove it" if word else "remove it, or set the variable that it comes from"
    if owner is None:
        return InputError(repr(word), "this word belongs to no option", remedy)
    return InputError(owner, f"{word!r} is one word too many after it", f"{remedy}, or quote words that are one value")
