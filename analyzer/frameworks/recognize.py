"""Whether the words of a launch are those of a framework: a YAML file, or a script or module of the framework.

Imports nothing that reads files, because each launch passes here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from analyzer.launch.info_options import PREFIX, has_value_after, takes_value

YAML: Final = (".yaml", ".yml")
LAUNCH: Final = "--info-launch"


class Program(NamedTuple):
    """A script or module that starts trainings of a framework."""

    framework: str
    name: str
    """Regular expression for the last part of its path without .py, or for a module."""
    folders: tuple[str, ...] = ()
    """One of these is in its path, if its name alone says too little."""


PROGRAMS: Final = (
    Program("verl", r"verl\.trainer\.(main_ppo|sft_trainer|main_\w+)|recipe\.\w+\.main_\w+|verl\.\w+\.main_ppo"),
    Program(
        "nemo_rl",
        r"run_(vlm_)?(grpo|sft|dpo|rm|ppo|distillation|mopd|async_grpo|opd)(_\w+)?",
        folders=("examples", "nemo_gym", "RL", "nemo-rl"),
    ),
    Program("roll", r"start_\w*pipeline\w*"),
    Program("bridge", r"run_recipe|run_script|setup_experiment|launch_with_nemo_run"),
    Program("primus", r"main", folders=("primus/cli", "primus\\cli")),
    Program("primus", r"primus\.cli\.main|primus-cli"),
    Program("primus", r"train", folders=("primus",)),
)
"""The first that fits counts."""
_BEFORE_PROGRAM: Final = ("-m", "--module", "verl_mlite.launch")
"""Words that the name of a module follows. The last starts modules of verl with Megatron Lite."""
_OF_MEGATRON: Final = "pretrain_"
"""Begins the names of Megatron's own scripts."""
_MS_SWIFT: Final = (frozenset({"megatron", "swift"}), frozenset({"sft", "pt", "rlhf"}))
"""The first two words of a command of ms-swift. Only those that begin with megatron train with Megatron-LM (swift/cli)."""


class Found(NamedTuple):
    """A launch of a framework."""

    framework: str | None
    """None for a YAML file, whose keys show the framework."""
    program: str
    """The YAML file, script or module."""
    words: tuple[str, ...]
    """What follows it, without --info options."""
    rest: tuple[str, ...]
    """Options of the launcher, and --info options."""


def recognize(argv: Sequence[str]) -> Found | None:
    """The launch of a framework; None for other launches. Raises UnsupportedError for a launch that trains without Megatron-LM."""
    info, words = _separated(argv)
    if all(word in names for word, names in zip(words, _MS_SWIFT, strict=False)) and len(words) > len(_MS_SWIFT):
        if words[0] == "swift":
            from analyzer.errors import UnsupportedError

            fault = "trains with the Trainer of transformers, and only training by Megatron-LM is modelled"
            raise UnsupportedError(f"swift {words[1]}", fault, f"use megatron {words[1]} of ms-swift")
        return Found("ms_swift", words[1], tuple(words[2:]), tuple(info))
    for position, word in enumerate(words):
        if word.endswith(YAML) and position == 0:
            return Found(None, word, tuple(words[1:]), tuple(info))
        program = _program(word) if _is_program(words, position) else None
        if program is not None:
            return Found(program.framework, word, tuple(words[position + 1 :]), (*words[:position], *info))
    if any(word.lstrip("+").startswith("actor_rollout_ref.") for word in words):
        settings = [word for word in words if "=" in word and not word.startswith("--n")]
        return Found("verl", "verl", tuple(settings), (*(word for word in words if word not in settings), *info))
    return None


def _program(word: str) -> Program | None:
    if word.startswith("-") or "=" in word:
        return None
    path = word.replace("\\", "/")
    name = os.path.basename(path).removesuffix(".py")
    if name.startswith(_OF_MEGATRON):
        return None
    for program in PROGRAMS:
        named = re.fullmatch(program.name, name) if path.endswith(".py") or "/" in path else re.fullmatch(program.name, word)
        if named and (not program.folders or any(part in path.split("/") or f"{part}/" in path for part in program.folders)):
            return program
    return None


def _is_program(words: Sequence[str], position: int) -> bool:
    """Whether the word is a script or the value of -m, and not that of another option of Megatron-LM."""
    return words[position].endswith(".py") or position == 0 or words[position - 1] in _BEFORE_PROGRAM


def words_of_launch(argv: Sequence[str]) -> list[str]:
    """The words without --info options and their values."""
    return _separated(argv)[1]


def _separated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The --info options with their values, and the other words."""
    info: list[str] = []
    words: list[str] = []
    position = 0
    while position < len(argv):
        name, equals, _ = argv[position].partition("=")
        count = 1
        if name.startswith(PREFIX) and not equals and _takes_value(name):
            count += has_value_after(name, argv[position + 1 : position + 2])
        (info if name.startswith(PREFIX) else words).extend(argv[position : position + count])
        position += count
    return info, words


def _takes_value(flag: str) -> bool:
    """False for an unknown --info option, which the reader of these options refuses."""
    from analyzer.errors import InputError

    try:
        return takes_value(flag)
    except InputError:
        return False
