"""Reads the launch in the text of a launch script without running it.

Only assignments, arrays and the launch itself are read: simple commands of bash outside of conditions, loops and functions.
Parameters are expanded as bash expands them where their values can be known from the text. What is not known, such as the output of
a command, is refused where the launch needs it, except as a part of a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os.path import basename
from typing import Final, NamedTuple

from analyzer.cli.explorer.shell_words import (
    UNKNOWN,
    Command,
    Expander,
    Unreadable,
    split_commands,
    split_words,
)
from analyzer.errors import InputError
from analyzer.launch.launchers.launcher_options import NAMES as LAUNCHERS

OPTION: Final = "launch"
REMEDY: Final = (
    "paste the launch command that get-training-info SCRIPT --info-dry prints, or open the script with get-training-info explore"
)
ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
OPENING: Final = frozenset({"if", "for", "while", "until", "case", "select", "{", "("})
BETWEEN_BRANCHES: Final = frozenset({"then", "else", "elif", "do", "!", ";"})
CLOSING: Final = frozenset({"fi", "done", "esac", "}", ")"})
DECLARING: Final = frozenset({"export", "declare", "local", "readonly", "typeset"})
WRAPPERS: Final = frozenset({"exec", "time", "nohup", "srun", "mpirun", "eval", "env"})
"""Commands before a launch. Their own options are left out."""
PYTHON: Final = re.compile(r"python[\d.]*")


class ScriptLaunch(NamedTuple):
    """The launch of a script."""

    words: tuple[str, ...]
    """From the launcher, or the training script, on."""
    environ: Mapping[str, str]
    """Variables that the text exports or sets for the launch."""
    empty: tuple[str, ...]
    """Variables that the text does not set and that are taken as empty."""


def is_script(text: str) -> bool:
    """Whether a text is more than one command, or begins with #!."""
    if text.lstrip().startswith("#!"):
        return True
    try:
        commands = [each for each in split_commands(text) if each.text.strip()]
    except Unreadable:
        return "\n" in text.strip()
    return len(commands) > 1


def launch_of_script(text: str) -> ScriptLaunch:
    """The only launch in the text of a script. Raises InputError if there is not one, or if it cannot be read."""
    reader = _Reader()
    try:
        for command in split_commands(text):
            reader.read(command)
    except (Unreadable, RecursionError) as error:
        raise InputError(OPTION, f"the script cannot be read without running it ({error})", REMEDY) from None
    if not reader.launches:
        raise InputError(OPTION, "the script has no launch that can be read without running it", REMEDY)
    if len(reader.launches) > 1:
        raise InputError(OPTION, f"the script has {len(reader.launches)} launches", "paste one of them")
    return reader.launches[0]


class _Reader:
    """Reads commands in their order."""

    def __init__(self) -> None:
        self.variables = Expander()
        self.exported: dict[str, str] = {}
        self.depth = 0
        self.launches: list[ScriptLaunch] = []

    def read(self, command: Command) -> None:
        raw = split_words(command.text)
        while raw and raw[0] in (*OPENING, *CLOSING, *BETWEEN_BRANCHES):
            self.depth = max(self.depth + (raw[0] in OPENING) - (raw[0] in CLOSING), 0)
            if raw[0] in ("for", "select"):
                self.variables.forget("".join(raw[1:2]))
            raw = raw[1:]
        if _is_function(raw):
            self.depth += raw.count("{") - raw.count("}")
        if self.depth or command.depends or _is_function(raw):
            for word in raw:
                if found := ASSIGNMENT.match(word):
                    self.variables.forget(found[1])
        if not _is_function(raw):
            self._simple(raw, depends=command.depends)

    def _simple(self, raw: list[str], *, depends: bool) -> None:
        declares = bool(raw) and raw[0] in DECLARING
        exports = declares and raw[0] == "export"
        words = raw[1:] if declares else raw
        own: dict[str, str] = {}
        while words and (declares or ASSIGNMENT.fullmatch(words[0])):
            word = words.pop(0)
            found = ASSIGNMENT.fullmatch(word)
            if found is not None:
                name, plus, value = found.groups()
                if not self.depth and not depends:
                    self.variables.assign(name, value, add=bool(plus))
                own[name] = value
            if exports and not word.startswith("-"):
                self.exported[word.partition("=")[0]] = ""
        if words and not declares:
            self._command(words, tuple(own))

    def _command(self, raw: list[str], own: tuple[str, ...]) -> None:
        if raw[0] in ("unset", "read", "mapfile", "readarray", "getopts", "printf", "let"):
            for word in raw[1:]:
                self.variables.forget(word.partition("=")[0])
            return
        if raw[0] in ("source", ".") or (raw[0] == "eval" and not _may_launch(raw, self.variables)):
            self.variables.sourced = True
            return
        if not _may_launch(raw, self.variables):
            return
        if self.depth:
            raise Unreadable("the launch is inside a condition, loop or function")
        words = [word for each in raw for word in self.variables.words(each)]
        begin = _begin(words)
        if begin is None:
            return
        names = {*self.exported, *own}
        environ = {name: value for name in names if (value := self.variables.text(name)) not in (None, UNKNOWN)}
        found = tuple(_until_redirection(words[begin:]))
        self.launches.append(ScriptLaunch(found, {k: v for k, v in environ.items() if v is not None}, tuple(self.variables.empty)))


def _is_function(raw: list[str]) -> bool:
    """Whether a command is the head of a function."""
    return bool(raw) and (raw[0] == "function" or raw[0].endswith("()") or raw[1:2] == ["()"])


def _may_launch(raw: list[str], variables: Expander) -> bool:
    """Whether a command may be a launch: its first words are a launcher or a training script, or variables with them."""
    try:
        words = [word for each in raw[:8] for word in variables.words(each)]
    except Unreadable:
        return _is_launch(raw)
    return _is_launch(words) or _is_launch(raw)


def _is_launch(words: list[str]) -> bool:
    return _begin(words) is not None


def _begin(words: list[str]) -> int | None:
    """The position of the launcher or of the training script."""
    for place, word in enumerate(words):
        name = basename(word)
        if name in LAUNCHERS:
            return place
        if PYTHON.fullmatch(name):
            found = _of_python(words[place + 1 :])
            return None if found is None else place + 1 + found
        if place == 0 and name not in WRAPPERS:
            return None
    return None


def _of_python(rest: list[str]) -> int | None:
    """The position of the launcher or of the training script behind `python`."""
    place = 0
    while place < len(rest) and rest[place].startswith("-") and rest[place] != "-m":
        place += 1
    if rest[place : place + 1] == ["-m"]:
        return place + 1 if len(rest) > place + 1 and rest[place + 1] in LAUNCHERS else None
    is_script = place < len(rest) and rest[place].endswith(".py") and any(word.startswith("--") for word in rest[place:])
    return place if is_script else None


def _until_redirection(words: list[str]) -> Iterator[str]:
    for word in words:
        if re.match(r"\d?>|&>|<", word):
            return
        yield word
