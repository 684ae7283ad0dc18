"""Turns the words of a command into those of the drop-in form: `fit train.sh --gpu H200` into `--info-gpu H200 train.sh`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from analyzer.cli.commands.table import COMMANDS, EXPLORE, GENERATION, fields_of, flag_of_field
from analyzer.errors import InputError
from analyzer.launch.info_options import OPTIONS, PREFIX, SCRIPT_ENDINGS
from analyzer.launch.launchers.launcher_options import NAMES as LAUNCHERS

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
WRITTEN: Final = frozenset({"json", "html", "timeline"})
"""Options that name a file to write."""
PYTHON: Final = ("python", "python3")
OF_LAUNCH: Final = ("set", "unset")
"""Options whose value is an option of the launch, and may begin with dashes."""
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
        field = known.get(flag) or _of_drop_in_form(flag)
        if field is not None:
            own.append((field, _value(name, field, flag, attached if equals else None, rest)))
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


def _of_drop_in_form(flag: str) -> str | None:
    """The field of an option of the drop-in form, such as `--info-gpu`; None for other words."""
    field = flag.removeprefix(PREFIX).replace("-", "_")
    return field if flag.startswith(PREFIX) and field in OPTIONS else None


def _value(name: str, field: str, flag: str, attached: str | None, rest: list[str]) -> str | None:
    """The value of an option, which is taken from `rest` unless it is attached; None for an option without one."""
    if field not in GENERATION and not OPTIONS[field].value:
        if attached is not None:
            raise InputError(flag, "takes no value", f"write {flag}, or leave it out")
        return None
    if attached == "" or (attached is None and (not rest or (rest[0].startswith("--") and field not in OF_LAUNCH))):
        raise InputError(flag, "has no value", f"get-training-info {name} --help shows what it takes")
    return rest.pop(0) if attached is None else attached


def _unknown(name: str, word: str, known: Mapping[str, str]) -> InputError:
    from difflib import get_close_matches

    near = get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    remedy = f"{meant}Options of the launch follow the script, the model or {END}"
    return InputError(word, f"is not an option of {name}", remedy[0].lower() + remedy[1:])


def _allows_options(word: str) -> bool:
    """Whether options of the command may follow a target: a script, a file or a model, but no launch command."""
    return is_model(word) or word.endswith((*SCRIPT_ENDINGS, ".yaml", ".yml", ".json")) or os.path.isfile(word)


def _begins_a_launch(word: str) -> bool:
    """Whether a word is the first one of a second launch: a target after which options may stand, or a program that starts one."""
    if "=" in word:  # a value of a configuration, such as model.path=config.json
        return False
    return _allows_options(word) or os.path.basename(word) in (*LAUNCHERS, *PYTHON)


def is_model(word: str) -> bool:
    """Whether a word names a model: its Hugging Face name, a known name without organization, or its config.json or folder."""
    if os.path.isfile(os.path.join(word, MODEL_FILE)):
        return True
    if os.path.isfile(word) or word.endswith(SCRIPT_ENDINGS):
        return os.path.basename(word) == MODEL_FILE
    if MODEL_NAME.fullmatch(word):
        return not word.endswith((".py", ".yaml", ".yml", ".json"))
    from analyzer.launch.model_config.published import published_names

    return word.lower() in published_names()


def two_launches(name: str, words: Sequence[str]) -> tuple[Asked, Asked]:
    """The two launches of a command, each with its options. The old one writes no files.

    The words of the new launch begin with the first word after the old one that names a script, a file or a model. Options of
    Megatron after two models belong to both. Raises InputError if there are not two.
    """
    asked = split(name, words)
    begin = next((place for place, word in enumerate(asked.target) if place and _begins_a_launch(word)), 1)
    if len(asked.target) < 2 or asked.target[begin].startswith("-"):
        raise InputError(name, "needs two launches", f"write get-training-info {name} {COMMANDS[name].example}")
    old, new = asked.target[:begin], asked.target[begin:]
    if is_model(old[0]) and is_model(new[0]) and not old[1:]:
        old += new[1:]
    return Asked(tuple(each for each in asked.own if each[0] not in WRITTEN), old), asked._replace(target=new)


def drop_in_words(name: str, words: Sequence[str]) -> list[str]:
    """The words of the drop-in form. Raises InputError for options that are not those of the command, and without a target."""
    return words_of(name, split(name, words))


def words_of(name: str, asked: Asked) -> list[str]:
    """The words of the drop-in form for the words of a command. Raises InputError without a target."""
    command = COMMANDS[name]
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
    elif "world_size" not in given and name not in ("serve", EXPLORE):
        remedy = f"add --gpus N; get-training-info gpus {first} finds the smallest number"
        raise InputError(first, "the number of GPUs is not given", remedy)
    if name in SEARCHING and not any(word.partition("=")[0] == BATCH for word in rest):
        from analyzer.cli.output import print_message

        print_message(f"{BATCH} {ASSUMED_BATCH} is assumed; write another one after the name of the model")
        found += [BATCH, ASSUMED_BATCH]
    return found
