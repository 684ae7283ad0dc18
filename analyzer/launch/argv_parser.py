"""Parses Megatron's part of a command line from a table of options, as argparse with allow_abbrev=False would.

argparse itself is not used, because it prints errors and exits, and knows neither misspelled options nor values that forks add.
The rules are those of CPython's argparse: an option takes the words up to the next option, `--option=value` gives it one value, and
of several equal options the last one wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.options.option_table import Option, OptionTable
from analyzer.launch.options.option_values import InvalidValue, convert
from analyzer.launch.spelling import is_misspelling

NEW_NAMES: Final[Mapping[str, Mapping[object, object]]] = {"experimental_attention_variant": {"gdn": "gated_delta_net"}}
"""By dest: new names of values of the catalogue (core 0.20: `GDN_ATTENTION_VARIANTS`)."""
OPEN_CHOICES: Final = frozenset({"tokenizer_type"})
"""Dests for which other values are accepted: forks have further tokenizers, of which only the number of tokens matters."""

LENGTHS: Final = frozenset({"seq_length", "max_position_embeddings", "encoder_seq_length", "decoder_seq_length"})
"""Dests of lengths in tokens, for which 32k is 32,768."""
THOUSANDS: Final = re.compile(r"(\d{1,6})[kK]")
FILES: Final = (
    (".json", "a JSON file", "give the config.json of a model with --info-model, and an older report with --info-against"),
    (".yaml", "a YAML file", "give Megatron's own with --yaml-cfg, behind pretrain_gpt.py"),
    (".yml", "a YAML file", "give Megatron's own with --yaml-cfg, behind pretrain_gpt.py"),
    (".md", "a text", "give the script or the launch command that it describes"),
    (".txt", "a text", "give the script or the launch command that it describes"),
    (".toml", "a configuration file", "give the launch script, or the launch command"),
    (".ipynb", "a notebook", "give the launch command that it has"),
)
"""Endings of files that are given as a script, what they are, and what to give."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsed words: the value of each dest, and its flag as written."""

    values: dict[str, object]
    spelled: dict[str, str]
    notes: tuple[str, ...] = ()
    """About values that Megatron's own parser refuses, one sentence each."""


def read_words(words: Sequence[str], table: OptionTable) -> Reading:
    """Parses `words`, whose flags are all in `table`. Raises InputError for values that argparse would refuse."""
    values: dict[str, object] = {}
    spelled: dict[str, str] = {}
    position = 0
    owner: str | None = None
    notes: list[str] = []
    while position < len(words):
        flag, equals, attached = words[position].partition("=")
        position += 1
        option = table.options.get(flag) if is_option(flag) else None
        if option is None:
            raise _unexpected_word(words[position - 1], owner=owner)
        owner = flag
        if equals:
            operands = [attached]
        else:
            operands = operands_of(option, words[position:])
            position += len(operands)
        if option.dest in LENGTHS and operands and (thousands := THOUSANDS.fullmatch(operands[0])):
            tokens = int(thousands[1]) * 1024
            notes.append(f"{flag} {operands[0]} is read as {tokens:,}. Megatron-LM's own parser needs {flag} {tokens}.")
            operands = [str(tokens)]
        values[option.dest] = _value(option, flag, operands, attached=bool(equals))
        spelled[option.dest] = flag
    return Reading(values, spelled, tuple(notes))


def is_option(word: str) -> bool:
    """Whether argparse treats `word` as an option: it starts with a dash, is not a number and contains no space."""
    if not word.startswith("-") or word == "-":
        return False
    return " " not in word and not _is_number(word)


def options_with_values(words: Sequence[str]) -> list[list[str]]:
    """The options in `words`, each with the words up to the next one."""
    found: list[list[str]] = []
    for word in words:
        if is_option(word) or not found:
            found.append([])
        found[-1].append(word)
    return found


def words_of_options(options: Mapping[str, object]) -> list[str]:
    """The words of options by flag, without those that are None or False."""
    words: list[str] = []
    for flag, value in options.items():
        if value is None or value is False:
            continue
        words.append(flag)
        if value is not True:
            words += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return words


def operands_of(option: Option, following: Sequence[str]) -> list[str]:
    """The words in `following` that are values of the option."""
    if option.kind != "store":
        return []
    limits = {None: 1, "?": 1, "*": len(following), "+": len(following)}
    limit = option.nargs if isinstance(option.nargs, int) else limits[option.nargs]
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
    """The value of an option from its words. Raises InputError for a wrong number of words, type or choice."""
    if option.kind != "store":
        if attached:
            raise InputError(flag, f"takes no value, and {operands[0]!r} is given", f"write {flag} alone, or leave it out")
        return not flag.startswith("--no-") if option.kind == "boolean" else option.const
    minimum = {None: 1, "+": 1, "*": 0, "?": 0}
    needed = option.nargs if isinstance(option.nargs, int) else minimum[option.nargs]
    if len(operands) < needed:
        if needed == 1:
            raise InputError(flag, "has no value", _example(option, flag))
        raise InputError(flag, f"needs {needed} values, and {len(operands)} are given", f"write {flag} with {needed} values")
    if option.nargs == "?" and not operands:
        return option.const
    converted = tuple(_converted(option, flag, word) for word in operands)
    return converted[0] if option.nargs in (None, "?") else converted


def _example(option: Option, flag: str) -> str:
    if option.choices:
        return f"write {flag} {_listed(option.choices)}"
    sample = {"int": "8", "float": "0.1"}.get(option.type or "str", "VALUE")
    return f"write {flag} {sample}, or set the shell variable that is empty"


def _converted(option: Option, flag: str, word: str) -> object:
    try:
        value = convert(word, "exit_signal" if option.dest == "exit_signal" else option.type)
    except InvalidValue as error:
        raise InputError(flag, error.fault, error.remedy) from None
    value = NEW_NAMES.get(option.dest, {}).get(value, value)
    if option.dest in OPEN_CHOICES and value not in (option.choices or ()):
        if near := [each for each in option.choices or () if is_misspelling(word, str(each))]:
            raise InputError(flag, f"{word!r} is not a valid choice", f"did you mean {near[0]}?")
    elif option.choices is not None and value not in option.choices:
        raise InputError(flag, f"{word!r} is not a valid choice", f"use {_listed(option.choices)}")
    return value


def _listed(choices: Sequence[object]) -> str:
    *most, last = [str(choice) for choice in choices if choice is not None]
    return f"{', '.join(most)} or {last}" if most else last


def _unexpected_word(word: str, *, owner: str | None) -> InputError:
    """The error for a word that is not a value of an option; `owner` is the last option before it."""
    if word.startswith("-") and " " in word:
        return InputError(word.split()[0], f"{word!r} is quoted, so the option and its value are one word", "remove the quotes")
    remedy = "remove it" if word else "remove it, or set the shell variable that is empty"
    if owner is None:
        kind, use = next((each[1:] for each in FILES if word.lower().endswith(each[0])), ("", ""))
        if kind:
            return InputError(repr(word), f"is {kind}, not a launch script", use)
        return InputError(repr(word), "is not an option or the value of one", remedy)
    fault = f"{word!r} after it is not a script, an option or a value"
    return InputError(owner, fault, f"{remedy}, or quote a value that contains spaces")
