"""The state of the explorer: a launch as text, a GPU, a number of GPUs, and options that differ from those of the text.

A state is a JSON object with the fields of `State`, so that a link can carry it. `read` gives the launch of a state, with the same
words that the command line would get.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from analyzer.api import Launch, read_launch
from analyzer.cli.explorer.launch_text import FOLDER, LaunchText, read_text
from analyzer.errors import InputError
from analyzer.launch.argv_parser import options_with_values
from analyzer.launch.inference.options import asks_for_inference
from analyzer.launch.info_options import GPU, MODEL, SET, UNSET, asks_for_search, separated, takes_value, value_of
from analyzer.launch.launchers.world import PER_NODE
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv

WORLD_SIZE: Final = "--info-world-size"
USUAL_GPU: Final = "H100-80GB"
"""The GPU of a launch that names none."""
LONGEST: Final = 200_000
"""Characters of a launch."""
FIELDS: Final = ("launch", "gpu", "gpus", "set", "unset")
Value = str | int | float | bool | list[str]


@dataclass(frozen=True, kw_only=True)
class State:
    """A state."""

    launch: str
    gpu: str | None = None
    """None for that of the text, or else `USUAL_GPU`."""
    gpus: int | None = None
    """The number of GPUs; None for that of the text."""
    set: Mapping[str, Value] = field(default_factory=dict)
    """Options of Megatron by flag that replace those of the text; True for an option without a value."""
    unset: tuple[str, ...] = ()
    """Options of the text that are left out, by flag."""

    def as_json(self) -> dict[str, Any]:
        """The state as values for the `json` module."""
        return {"launch": self.launch, **self.changes_json()}

    def changes_json(self) -> dict[str, Any]:
        """The state without its launch, for a choice of a control."""
        return {"gpu": self.gpu, "gpus": self.gpus, "set": dict(self.set), "unset": list(self.unset)}


@dataclass(frozen=True)
class Opened:
    """The launch with which the explorer was started, with the environment and the folder of its script."""

    text: str
    """The text in the page that stands for it."""
    words: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path
    copies: Path | None = None
    """The folder with files that its script wrote (`launch.written_files`)."""


@dataclass(frozen=True)
class Read:
    """The launch of a state."""

    state: State
    text: LaunchText
    argv: tuple[str, ...]
    """The words of the drop-in form."""
    launch: Launch


def state_of(value: object) -> State:
    """The state that a JSON value describes. Raises InputError."""
    if not isinstance(value, dict) or not isinstance(value.get("launch"), str):
        raise _wrong("has no launch")
    if unknown := sorted(set(value) - set(FIELDS)):
        raise _wrong(f"has the unknown field {unknown[0]!r:.40}")
    if len(value["launch"]) > LONGEST:
        raise InputError("launch", f"has more than {LONGEST:,} characters", "paste the launch command only")
    gpu, gpus, options, unset = (value.get(name) for name in FIELDS[1:])
    if gpu is not None and not (isinstance(gpu, str) and gpu and len(gpu) < 100):
        raise _wrong("has a GPU that is no name")
    if gpus is not None and not (isinstance(gpus, int) and not isinstance(gpus, bool) and 0 < gpus <= 1_000_000):
        raise InputError("GPUs", f"{gpus!r:.40} is not a number of GPUs", "write a number from 1 to 1,000,000")
    if not isinstance(options or {}, dict) or not all(_is_flag(flag) and _is_value(each) for flag, each in (options or {}).items()):
        raise _wrong("has options that are not pairs of a flag and a value")
    if not isinstance(unset or [], list) or not all(_is_flag(flag) for flag in unset or ()):
        raise _wrong("leaves out something that is no option")
    return State(launch=value["launch"], gpu=gpu, gpus=gpus, set=dict(options or {}), unset=tuple(unset or ()))


def _wrong(fault: str) -> InputError:
    return InputError("state", fault, "open the page without the part of its address after #")


def _is_flag(value: object) -> bool:
    return isinstance(value, str) and value.startswith("--") and not value.startswith("--info-") and value.isprintable()


def _is_value(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return value is True or (isinstance(value, str | int | float) and not isinstance(value, bool))


def read(state: State, opened: Opened | None = None) -> Read:
    """The launch of a state. A text that equals that of `opened` stands for it. Raises AnalyzerError."""
    text = text_of(state.launch, opened)
    argv = argv_of(state, text)
    environ, folder = text.environ, FOLDER
    if opened is not None and _is_opened(state.launch, opened):
        folder = opened.folder
    if asks_for_inference(argv) or asks_for_search(argv):
        raise InputError("launch", "asks for inference or for a search", "paste a training; the page has a search of its own")
    launch = read_launch(argv, environ=environ, folder=folder)
    return Read(state, text, tuple(argv), launch)


def text_of(launch: str, opened: Opened | None) -> LaunchText:
    """The words of the text of a state. Raises InputError."""
    if opened is not None and _is_opened(launch, opened):
        kind = "opened" if value_of(MODEL, opened.words) is None else "model"
        return LaunchText(kind, opened.words, opened.environ)
    return _read_text(launch)


_read_text = lru_cache(maxsize=8)(read_text)


def _is_opened(launch: str, opened: Opened | None) -> bool:
    return opened is not None and launch.strip() == opened.text.strip()


def argv_of(state: State, text: LaunchText) -> list[str]:
    """The words of the drop-in form: those of the text, with the GPU, the number of GPUs and the options of the state."""
    own, others = separated(text.words)
    gpu = state.gpu or value_of(GPU, own) or USUAL_GPU
    options = [*_without(own, (GPU, *((WORLD_SIZE,) if state.gpus else ()))), GPU, gpu]
    if state.gpus:
        options += [WORLD_SIZE, str(state.gpus), *_nodes(text, state.gpus)]
    if state.set:
        options += [SET, shlex.join(words_of(state.set))]
    if state.unset:
        options += [UNSET, ",".join(flag.removeprefix("--") for flag in state.unset)]
    return [*options, *others]


def _nodes(text: LaunchText, gpus: int) -> list[str]:
    """The option that keeps the GPUs of a node of the launcher, if they divide another number of GPUs."""
    options = split_argv(text.words, load_catalogue().newest).launcher_options
    size = next((value for dest, value, _ in reversed(options) if dest == "nproc_per_node"), None)
    if size is None or not size.isdigit() or not int(size) or gpus % int(size):
        return []
    return [PER_NODE, size]


def _without(own: list[str], flags: tuple[str, ...]) -> list[str]:
    """The options of this program without some of them and their values."""
    found: list[str] = []
    rest = list(own)
    while rest:
        word = rest.pop(0)
        group = [word, *_value_in(rest, word)]
        if word.partition("=")[0] not in flags:
            found += group
    return found


def _value_in(rest: list[str], word: str) -> list[str]:
    """The value of an option, which is taken from the words behind it."""
    return [rest.pop(0)] if takes_value(word) and "=" not in word and rest else []


def words_of(options: Mapping[str, Value]) -> list[str]:
    """Options as words."""
    found: list[str] = []
    for flag, value in options.items():
        found.append(flag)
        if value is not True:
            found += [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return found


def changed(read: Read, options: Mapping[str, object], *, gpu: str | None = None, gpus: int | None = None) -> State:
    """The state with other options, by flag; False or None for those that are left out."""
    state = read.state
    in_text = options_in_text(read.text)
    found: dict[str, Value] = dict(state.set)
    unset = dict.fromkeys(state.unset)
    for flag, value in options.items():
        found.pop(flag, None)
        unset.pop(flag, None)
        if value is None or value is False:
            if flag in in_text:
                unset[flag] = None
        elif in_text.get(flag) != _as_words(value):
            found[flag] = _as_value(value)
    return replace(state, set=found, unset=tuple(unset), gpu=gpu or state.gpu, gpus=gpus or state.gpus)


def _as_value(value: object) -> Value:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return value if isinstance(value, str | int | float) else str(value)


def _as_words(value: object) -> tuple[str, ...]:
    return tuple(words_of({"": _as_value(value)})[1:])


def options_in_text(text: LaunchText) -> Mapping[str, tuple[str, ...]]:
    """The options of Megatron in a text with their values, by flag; of equal ones the last."""
    return _options_in_words(tuple(text.words))


@lru_cache(maxsize=8)
def _options_in_words(words: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    split = split_argv(words, load_catalogue().newest)
    found: dict[str, tuple[str, ...]] = {}
    for group in options_with_values(split.megatron):
        flag, equals, attached = group[0].partition("=")
        found[flag] = (attached,) if equals else tuple(group[1:])
    return found
