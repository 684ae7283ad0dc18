"""Splits a command line into torchrun's, Megatron's and our own options, in whatever order they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError
from analyzer.launch import info_options
from analyzer.launch.argv_parser import is_option, operands_of
from analyzer.launch.launchers import torchrun_options
from analyzer.launch.options.option_table import Option

LAUNCHERS: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
"""Names of the launcher itself, where a script kept them in front of its options."""
UNBUFFERED: Final = "-u"
"""Python's own switch, of `python -u pretrain_gpt.py`."""


@dataclass(frozen=True, slots=True)
class SplitArgv:
    """One command line, sorted by who reads each word."""

    torchrun: tuple[tuple[str, str | None, str], ...]
    """(dest, value, flag as written) in the order given; value None for an option that takes none."""
    info: tuple[tuple[str, str | None], ...]
    """(flag, value) in the order given."""
    megatron: tuple[str, ...]
    entry: str | None
    """The training script or module."""


def split_argv(argv: Sequence[str], known: Mapping[str, Option]) -> SplitArgv:
    """Sort the words of `argv`. `known` are Megatron's options by flag: an exact name of Megatron's always wins.

    The training script is the first word that is no option's value and ends in .py, or follows `-m` or `--no-python`.
    Abbreviated options of torchrun are understood in front of it, as torchrun itself does.
    """
    torchrun: list[tuple[str, str | None, str]] = []
    info: list[tuple[str, str | None]] = []
    megatron: list[str] = []
    entry: str | None = None
    any_entry = False
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, attached = word.partition("=")
        if flag.startswith(info_options.PREFIX):
            value = attached if equals else None
            if info_options.takes_value(flag) and not equals:
                value = words.pop(0) if words and not is_option(words[0]) else None
            info.append((flag, value))
        elif is_option(word) and flag in known:
            megatron.append(word)
            if not equals:
                operands = _without_script(known[flag], operands_of(known[flag], words), script_is_due=entry is None)
                megatron.extend(operands)
                del words[: len(operands)]
        elif is_option(word) and (option := torchrun_options.find(word, abbreviated=entry is None)):
            value = option.attached
            if option.takes_value and value is None:
                if not words or is_option(words[0]):
                    raise InputError(option.written, "has no value", f"write {option.written} VALUE")
                value = words.pop(0)
            torchrun.append((option.dest, value, option.written))
            any_entry = any_entry or option.dest in ("module", "no_python")
        elif entry is None and word in LAUNCHERS:
            torchrun, any_entry = [option for option in torchrun if option[0] != "module"], False
        elif entry is None and word == UNBUFFERED:
            continue
        elif entry is None and not is_option(word) and (word.endswith(".py") or any_entry):
            entry = word
        else:
            megatron.append(word)
    return SplitArgv(tuple(torchrun), tuple(info), tuple(megatron), entry)


def _without_script(option: Option, operands: list[str], *, script_is_due: bool) -> list[str]:
    """The operands of an option that takes any number of them, up to the training script if that is still to come."""
    if script_is_due and option.nargs in ("*", "+"):
        for position, word in enumerate(operands):
            if word.endswith(".py"):
                return operands[:position]
    return operands
