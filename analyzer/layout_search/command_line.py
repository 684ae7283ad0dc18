"""The complete command line of a layout, to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from analyzer.launch.argv_parser import options_with_values, words_of_options
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv
from analyzer.specs.option_names import flag_of

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

ENTRY: Final = "pretrain_gpt.py"
COMMANDS: Final = 3
"""Layouts of a search whose command lines are printed."""


def command_line(argv: Sequence[str], arguments: Arguments, options: Mapping[str, object]) -> str:
    """The command line of a launch with changed options, quoted for a shell, without options of this program.

    `argv`: the words of the launch. `options`: the changed options by flag; False or None for those that are left out.
    """
    split = split_argv(argv, load_catalogue().newest)
    launcher = [word for _, value, flag in split.launcher_options for word in (flag, *(() if value is None else (value,)))]
    dests = dests_of(arguments)
    changed = {dests.get(flag, flag) for flag in options}
    groups = {_flag(group): group for group in options_with_values(arguments.words)}  # of equal options the last one counts
    kept = [word for flag, group in groups.items() if dests.get(flag) not in changed for word in group]
    return shlex.join((split.launcher or "torchrun", *launcher, split.entry or ENTRY, *kept, *words_of_options(options)))


def dests_of(arguments: Arguments) -> dict[str, str]:
    """The dests of Megatron's options by flag, with those that the launch spells in another way."""
    return {flag_of(dest): dest for dest in arguments.values} | {flag: dest for dest, flag in arguments.spelled.items()}


def _flag(group: Sequence[str]) -> str:
    return group[0].partition("=")[0]
