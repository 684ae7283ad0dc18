"""Splits a command line into options of the launcher, of Megatron and of this program, in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.launch import info_options
from analyzer.launch.argv_parser import is_option, operands_of
from analyzer.launch.launchers import launcher_options
from analyzer.launch.launchers.launcher_options import ACCELERATE, NAMES, TORCHRUN
from analyzer.launch.options.option_table import Option

UNBUFFERED: Final = "-u"
"""Python's option for unbuffered output, as in `python -u pretrain_gpt.py`."""
SUBCOMMAND: Final = "launch"
"""The command of accelerate that starts a training."""
_PYTHON: Final = re.compile(r"(.*/)?python[\d.]*")
"""The interpreter, which may be before a launcher or a script."""


@dataclass(frozen=True, slots=True)
class SplitArgv:
    """A command line, split by the program that each word belongs to."""

    launcher: str | None
    """The launcher, if the command line still contains its name: torchrun (also torch.distributed.run), deepspeed or accelerate."""
    launcher_options: tuple[tuple[str, str | None, str], ...]
    """(dest, value, flag as written) in the order given; value is None for an option without a value."""
    info: tuple[tuple[str, str | None], ...]
    """(flag, value) in the order given."""
    megatron: tuple[str, ...]
    entry: str | None
    """The training script or module."""


class _Splitter:
    """The parts of a command line, collected word by word."""

    def __init__(self, argv: Sequence[str], known: Mapping[str, Option]) -> None:
        self.words = list(argv)
        self.known = known
        self.launcher: str | None = None
        self.options: list[tuple[str, str | None, str]] = []
        self.info: list[tuple[str, str | None]] = []
        self.megatron: list[str] = []
        self.entry: str | None = None
        self.any_entry = False
        """The next word that is not an option is the script, whatever its name."""

    def split(self) -> SplitArgv:
        while self.words:
            word = self.words.pop(0)
            if word.startswith(info_options.PREFIX):
                self._info_option(word)
            elif is_option(word):
                self._option(word)
            else:
                self._operand(word)
        return SplitArgv(self.launcher, tuple(self.options), tuple(self.info), tuple(self.megatron), self.entry)

    def _info_option(self, word: str) -> None:
        flag, equals, attached = word.partition("=")
        value = attached if equals else None
        if info_options.takes_value(flag) and not equals:
            has_value = info_options.has_value_after(flag, self.words)
            value = self.words.pop(0) if has_value else None
        self.info.append((flag, value))

    def _option(self, word: str) -> None:
        flag, equals, _ = word.partition("=")
        of_megatron = flag in self.known
        before_script = self.entry is None
        named = before_script and self.launcher not in (None, TORCHRUN)
        option = None
        if not of_megatron or named:
            option = launcher_options.find(word, launcher=self.launcher, before_script=before_script)
        if option is not None:
            self._launcher_option(option)
        elif before_script and word == UNBUFFERED:
            return
        else:
            self.megatron.append(word)
            if of_megatron and not equals:
                operands = operands_of(self.known[flag], self.words)
                operands = _without_script(self.known[flag], operands, script_is_due=before_script)
                self.megatron.extend(operands)
                del self.words[: len(operands)]

    def _launcher_option(self, option: launcher_options.LauncherOption) -> None:
        value = option.attached
        if option.takes_value and value is None and self.words:
            missing = is_option(self.words[0]) or self.words[0].endswith(".py")  # the training script
            value = None if missing else self.words.pop(0)
        self.options.append((option.dest, value, option.written))
        self.any_entry = self.any_entry or option.dest in ("module", "no_python")

    def _names_module(self) -> bool:
        """Whether the next word follows -m."""
        return bool(self.options) and self.options[-1][0] == "module"

    def _operand(self, word: str) -> None:
        name = word.rpartition("/")[2]
        started = self.launcher is not None or self.options or self.megatron
        if self.entry is not None:
            self.megatron.append(word)
        elif not self.megatron and not self._names_module() and _PYTHON.fullmatch(word):
            return
        elif name in NAMES:
            self.options = [option for option in self.options if option[0] != "module"]
            self.launcher, self.any_entry = NAMES[name], False
        elif word == SUBCOMMAND and (self.launcher == ACCELERATE or not started):
            self.launcher = ACCELERATE
        elif word.endswith(".py") or self.any_entry:
            self.entry = word
        else:
            self.megatron.append(word)


def split_argv(argv: Sequence[str], known: Mapping[str, Option]) -> SplitArgv:
    """Splits the words of `argv`. `known`: Megatron's options by flag.

    The training script is the first word that is not the value of an option and ends in .py, or follows `-m` or `--no-python`.
    Megatron's options take precedence over torchrun's, and may stand before the script. If the command line names deepspeed or
    accelerate, their options take precedence before the script. Abbreviated options of torchrun are accepted there. An option of
    a launcher without its value has the value None. Raises InputError for an unknown --info option.
    """
    return _Splitter(argv, known).split()


def _without_script(option: Option, operands: list[str], *, script_is_due: bool) -> list[str]:
    """The values of an option; if it takes any number of them and no script was found yet, those before the first .py word."""
    if script_is_due and option.nargs in ("*", "+"):
        for position, word in enumerate(operands):
            if word.endswith(".py"):
                return operands[:position]
    return operands
