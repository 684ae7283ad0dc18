"""Splits a command line into options of torchrun, of Megatron and of this program, in any order."""

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
"""Names of the launcher, if the command line still contains one."""
UNBUFFERED: Final = "-u"
"""Python's option for unbuffered output, as in `python -u pretrain_gpt.py`."""


@dataclass(frozen=True, slots=True)
class SplitArgv:
    """A command line, split by the program that each word belongs to."""

    torchrun: tuple[tuple[str, str | None, str], ...]
    """(dest, value, flag as written) in the order given; value is None for an option without a value."""
    info: tuple[tuple[str, str | None], ...]
    """(flag, value) in the order given."""
    megatron: tuple[str, ...]
    entry: str | None
    """The training script or module."""


def split_argv(argv: Sequence[str], known: Mapping[str, Option]) -> SplitArgv:
    """Splits the words of `argv`. `known`: Megatron's options by flag; they take precedence over torchrun's.

    The training script is the first word that is not the value of an option and ends in .py, or follows `-m` or `--no-python`.
    Abbreviated options of torchrun are accepted before it, as by torchrun. Raises InputError for a torchrun option without its
    value and for an unknown --info option.
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
    """The values of an option; if it takes any number of them and no script was found yet, those before the first .py word."""
    if script_is_due and option.nargs in ("*", "+"):
        for position, word in enumerate(operands):
            if word.endswith(".py"):
                return operands[:position]
    return operands
