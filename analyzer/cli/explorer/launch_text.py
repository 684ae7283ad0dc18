"""The words of a launch from the text that is pasted into the explorer: a command, a script or the name of a model.

A text is never run, and nothing that it names is executed: its training script is taken as a relative path in `FOLDER`, which does
not exist, so that no checkout of Megatron-LM is found beside it or on PYTHONPATH.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from os.path import basename
from pathlib import Path
from typing import Final, NamedTuple

from analyzer.cli.commands.table import COMMANDS
from analyzer.cli.commands.words import MODEL_NAME, PYTHON, drop_in_words
from analyzer.cli.explorer.shell_text import ASSIGNMENT, is_script, launch_of_script
from analyzer.errors import InputError
from analyzer.launch.info_options import MODEL, PREFIX, separated, value_of
from analyzer.launch.launchers.launcher_options import NAMES as LAUNCHERS
from analyzer.launch.model_config.published import published_names

OPTION: Final = "launch"
FOLDER: Final = Path("/folder-of-a-pasted-launch")
"""The working folder of a pasted launch. It does not exist."""
PROGRAMS: Final = ("get-training-info", "get_training_info.py")
ALLOWED: Final = frozenset(
    PREFIX + name
    for name in (
        "gpu", "gpu-memory", "world-size", "gpus-per-node", "margin", "network", "moe-imbalance", "set", "unset", "lora",
        "lora-regather",
        "megatron", "te", "torch", "model", "tokens", "price",
    )
)  # fmt: skip
"""Options of this program that a pasted text may have. Options that name files or start something are not among them."""


class LaunchText(NamedTuple):
    """A launch that was pasted."""

    kind: str
    """command, script or model."""
    words: tuple[str, ...]
    """The words of the drop-in form."""
    environ: Mapping[str, str]
    """Variables that the text sets."""
    notes: tuple[str, ...] = ()
    """What was assumed to read it, one sentence each."""


def read_text(text: str) -> LaunchText:
    """The launch in a text. Raises InputError."""
    if not text.strip():
        raise InputError(OPTION, "it is empty", "paste a launch command, a launch script or the Hugging Face name of a model")
    if is_script(text):
        return _checked(_of_script(text))
    try:
        words = shlex.split(text.replace("\\\r\n", " "), comments=True)
    except ValueError as error:
        raise InputError(OPTION, f"cannot be split into words: {str(error).lower()}", "close the quotation") from None
    if _is_own_command(words):
        return _checked(_of_own_command(words))
    if words and _names_model(words[0]):
        return _checked(LaunchText("model", (MODEL, *words), {}))
    if "$" in text or "`" in text or (words and _begins_shell(words)):
        return _checked(_of_script(text))
    return _checked(LaunchText("command", tuple(words), {}))


def _begins_shell(words: list[str]) -> bool:
    """Whether a command begins with an assignment, or with the program that starts Python or a launcher."""
    return bool(ASSIGNMENT.fullmatch(words[0])) or words[0] in ("env", "exec", "srun", "mpirun", "nohup") or _is_python(words[0])


def _is_python(word: str) -> bool:
    return basename(word) in PYTHON


def _of_script(text: str) -> LaunchText:
    found = launch_of_script(text)
    names = ", ".join(found.empty)
    notes = (f"Variables that the script does not set are taken as empty: {names}.",) if names else ()
    return LaunchText("script", found.words, found.environ, notes)


def _names_model(word: str) -> bool:
    """Whether a word is the name of a model; names of files and launchers are not."""
    if word.lower() in published_names():
        return True
    is_file = word.endswith((".py", ".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch"))
    return MODEL_NAME.fullmatch(word) is not None and not is_file and basename(word) not in LAUNCHERS


def _is_own_command(words: list[str]) -> bool:
    return any(basename(word) in PROGRAMS for word in words[:2])


def _of_own_command(words: list[str]) -> LaunchText:
    """A command line of this program: its drop-in form, or one of its commands."""
    place = next(place for place, word in enumerate(words) if basename(word) in PROGRAMS)
    rest = words[place + 1 :]
    if rest and rest[0] in COMMANDS:
        name, rest = rest[0], rest[1:]
        if COMMANDS[name].target != "launch" or name == "serve":
            raise InputError(f"get-training-info {name}", "is not about one training", "paste the launch, or a command such as fit")
        asked = COMMANDS[name].words
        rest = [word for word in drop_in_words(name, rest) if word not in asked]
    return LaunchText("command", tuple(rest), {})


def _checked(launch: LaunchText) -> LaunchText:
    """A launch whose words run nothing. Raises InputError for options of this program that a pasted text must not have."""
    own, others = separated(launch.words)
    if "/" in (value_of("--info-megatron", launch.words) or ""):
        raise InputError(
            "--info-megatron", "names a folder, whose code a pasted launch does not run", "name a release, such as 0.16.1"
        )
    for word in own:
        flag = word.partition("=")[0]
        if flag.startswith(PREFIX) and flag not in ALLOWED:
            raise InputError(flag, "cannot be used in a pasted launch", "leave it out, or use the command line")
    if not launch.words:
        raise InputError(OPTION, "it has no words", "paste a launch command, a launch script or the Hugging Face name of a model")
    if others and others[0].endswith((".sh", ".slurm", ".sbatch")):
        remedy = f"paste the text of the script, or run get-training-info explore {others[0]}"
        raise InputError(others[0], "is the name of a script, which a pasted launch does not run", remedy)
    if others and others[0].endswith((".yaml", ".yml")):
        raise InputError(
            others[0], "is the name of a file, which the page does not have", f"run get-training-info explore {others[0]}"
        )
    words = tuple(word.lstrip("/") if word.endswith(".py") else word for word in launch.words)
    return launch._replace(words=words, environ={name: value for name, value in launch.environ.items() if name != "PYTHONPATH"})
