"""Turns the words of a command into those of the drop-in form: `fit train.sh --gpu H200` into `--info-gpu H200 train.sh`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from analyzer.cli.commands.table import COMMANDS, GENERATION, fields_of, flag_of_field
from analyzer.errors import InputError
from analyzer.launch.info_options import OPTIONS, PREFIX, SCRIPT_ENDINGS

MODEL_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model on Hugging Face."""
MODEL_FILE: Final = "config.json"
END: Final = "--"
"""What follows it belongs to the script or the launch."""
BATCH: Final = "--global-batch-size"
ASSUMED_BATCH: Final = "1024"
"""Sequences of a global batch, where a model is named without one and the answer needs replicas."""
NODE: Final = "8"
"""GPUs of a node, where a model is named without a launch."""
EXAMPLES: Final[Mapping[str, str]] = {"batch": "8", "prompt": "2048", "generate": "256"}
"""A value of each option in `GENERATION`, for messages."""
SEARCHING: Final = frozenset({"search", "gpus", "context", "batch"})


class Asked(NamedTuple):
    """The words of a command, split."""

    own: tuple[tuple[str, str | None], ...]
    """The fields that its options give, with their values."""
    target: tuple[str, ...]
    """The words of the launch: a script with its arguments, the name of a model with options of Megatron, or a launch command."""


def split(name: str, words: Sequence[str]) -> Asked:
    """The options of a command, which may stand before and after the target, and the words of the target.

    All words after a launcher or `--` belong to the launch. Raises InputError for an unknown option before the target, and for an
    option without its value.
    """
    known = {flag_of_field(field): field for field in fields_of(name)}
    if name == "serve":
        known |= {f"--{part}": part for part in GENERATION}
    rest = list(words)
    own: list[tuple[str, str | None]] = []
    target: list[str] = []
    while rest:
        word = rest.pop(0)
        flag, equals, attached = word.partition("=")
        if word == END:
            target += rest
            break
        if flag in known:
            takes_value = flag[2:] in GENERATION or OPTIONS[known[flag]].value != ""
            own.append((known[flag], _value(name, flag, attached if equals else None, rest) if takes_value else None))
        elif word.startswith(PREFIX) or target:
            target.append(word)
        elif word.startswith("-"):
            raise _unknown(name, word, known)
        else:
            target.append(word)
            if not _allows_options(word):
                target += rest
                break
    return Asked(tuple(own), tuple(target))


def _value(name: str, flag: str, attached: str | None, rest: list[str]) -> str:
    if attached:
        return attached
    if not rest or (rest[0].startswith("--") and flag != "--set"):
        raise InputError(flag, "has no value", f"get-training-info {name} --help shows what it takes")
    return rest.pop(0)


def _unknown(name: str, word: str, known: Mapping[str, str]) -> InputError:
    from difflib import get_close_matches

    near = get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    remedy = f"{meant}Options of the launch follow the script, the model or {END}"
    return InputError(word, f"is not an option of {name}", remedy[0].lower() + remedy[1:])


def _allows_options(word: str) -> bool:
    """Whether options of the command may follow a target: a script, a file or a model, but no launch command."""
    return is_model(word) or word.endswith((*SCRIPT_ENDINGS, ".yaml", ".yml", ".json")) or os.path.isfile(word)


def is_model(word: str) -> bool:
    """Whether a word names a model: its Hugging Face name, a known name without organization, or its config.json."""
    if os.path.isfile(word) or word.endswith(SCRIPT_ENDINGS):
        return os.path.basename(word) == MODEL_FILE
    if MODEL_NAME.fullmatch(word):
        return not word.endswith((".py", ".yaml", ".yml", ".json"))
    from analyzer.launch.model_config.published import published_names

    return word.lower() in published_names()


def drop_in_words(name: str, words: Sequence[str]) -> list[str]:
    """The words of the drop-in form. Raises InputError for options that are not those of the command, and without a target."""
    command = COMMANDS[name]
    asked = split(name, words)
    if command.target == "none":
        if asked.target:
            raise InputError(asked.target[0], f"{name} takes no launch", f"write get-training-info {name}")
        return list(command.words)
    if not asked.target:
        remedy = f"write get-training-info {name} {command.example}"
        raise InputError(name, "names no script, model or launch command", remedy)
    return [*_of_options(name, asked), *_of_target(name, asked)]


def _of_options(name: str, asked: Asked) -> list[str]:
    """The `--info` options of a command."""
    given = {field for field, _ in asked.own}
    found = list(COMMANDS[name].words)
    if "detail" in given and "--info-detail" in found:
        found = found[: found.index("--info-detail")]
    if name == "serve":
        found += _generation(dict(asked.own))
    for field, value in asked.own:
        if field not in GENERATION:
            found += [PREFIX + field.replace("_", "-"), *([] if value is None else [value])]
    return found


def _generation(given: Mapping[str, str | None]) -> list[str]:
    """`--info-inference` from the options of `serve`; empty if the launch tells it. Raises InputError if only some are given."""
    missing = [part for part in GENERATION if part not in given]
    if missing and len(missing) < len(GENERATION):
        examples = " ".join(f"--{part} {EXAMPLES[part]}" for part in missing)
        raise InputError(" ".join(f"--{part}" for part in missing), "is not given", f"add {examples}")
    parts = [f"{part}={given[part]}" for part in GENERATION if part in given]
    return ["--info-inference", ",".join(parts)] if parts else []


def _of_target(name: str, asked: Asked) -> list[str]:
    first, *rest = asked.target
    if not is_model(first):
        return list(asked.target)
    found = ["--info-model", first, *rest]
    given = {field for field, _ in asked.own}
    if name == "gpus":
        found += ["--info-world-size", NODE] if "world_size" not in given else []
    elif "world_size" not in given and name != "serve":
        remedy = f"add --gpus N; get-training-info gpus {first} finds the smallest number"
        raise InputError(first, "the number of GPUs is not given", remedy)
    if name in SEARCHING and not any(word.partition("=")[0] == BATCH for word in rest):
        from analyzer.cli.output import print_message

        print_message(f"{BATCH} {ASSUMED_BATCH} is assumed; write another one after the name of the model")
        found += [BATCH, ASSUMED_BATCH]
    return found
