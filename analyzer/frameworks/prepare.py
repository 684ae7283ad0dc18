"""Turns a launch of a framework into words that `analyzer.launch.parse` reads; other launches stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.errors import InputError
from analyzer.frameworks.recognize import LAUNCH, YAML, Found, recognize

if TYPE_CHECKING:
    from analyzer.launch.megatron_words import MegatronWords
    from analyzer.launch.options.choose_release import LaterRelease


class Prepared(NamedTuple):
    """A launch, ready for `analyzer.launch.parse.parse`."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    own: MegatronWords | None = None
    """The options of Megatron-LM that a configuration of a framework stands for; None for a command line of options."""
    framework: str | None = None
    """The framework that the launch is one of."""
    later: LaterRelease | None = None
    """The release that is assumed because an earlier one refuses the launch."""


def with_later_releases(prepared: Prepared, refusal: InputError) -> Iterator[Prepared]:
    """The launch with each release that may accept what the assumed one refuses, for launches of frameworks (`parse`)."""
    if prepared.later is None:
        from analyzer.launch.options.choose_release import LATER, LaterRelease  # for refused launches only

        for release in LATER:
            yield prepared._replace(later=LaterRelease.after(release, refusal))


class Input(NamedTuple):
    """What a reader of a framework is given."""

    found: Found
    environ: Mapping[str, str]
    folder: Path
    """The working folder of the launch."""

    def configuration(self, *flags: str) -> tuple[str, list[str], list[str]]:
        """The configuration that follows one of `flags`, or that is the program, with the words before and after it.

        Raises InputError for a script without one.
        """
        words = list(self.found.words)
        if self.found.program.endswith(YAML):
            return self.found.program, [], words
        for position, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag in flags:
                name = value if equals else next(iter(words[position + 1 : position + 2]), "")
                return name, words[:position], words[position + (1 if equals else 2) :]
        raise InputError(self.found.program, "has no configuration", "add --config FILE.yaml, or analyze the file itself")


class Output(NamedTuple):
    """What a reader of a framework returns: options of Megatron-LM, or the words of a command line that is read as usual."""

    own: MegatronWords | None = None
    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = MappingProxyType({})
    """Variables that the configuration sets."""
    without: frozenset[str] = frozenset()
    """Variables of the launch that have no effect: Megatron-LM checks them, and the framework does not."""


def prepare(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> Prepared:
    """The launch as `parse` reads it. Raises InputError for a configuration that cannot be read or is of no known framework."""
    found = recognize(argv)
    if found is None:
        return Prepared(tuple(argv), environ)
    if any(word.partition("=")[0] == LAUNCH for word in found.rest):
        raise InputError(LAUNCH, "starts Megatron-LM's own scripts only", "leave it out, and start the framework's command")
    launch = Input(found, environ, folder)
    framework = _framework(launch)
    output = _reader(framework)(launch)
    kept = {name: value for name, value in environ.items() if name not in output.without}
    return Prepared((*found.rest, *output.argv), {**output.environ, **kept}, output.own, framework)


def _framework(launch: Input) -> str:
    """Its name. Raises InputError for a YAML file of no known one."""
    if launch.found.framework is not None:
        return launch.found.framework
    from analyzer.frameworks.yaml_files import read_tree

    name = framework_of(read_tree(launch.folder / launch.found.program, launch.found.program))
    if name is None:
        fault = "has keys of no known framework"
        remedy = "give a configuration of Megatron-Bridge, NeMo-RL, Primus, ROLL, verl or ms-swift, or --yaml-cfg FILE"
        raise InputError(launch.found.program, fault, remedy)
    return name


def _reader(framework: str) -> Callable[[Input], Output]:
    from importlib import import_module

    reader: Callable[[Input], Output] = import_module(f"analyzer.frameworks.{framework}").read
    return reader


_KEYS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("primus", ("modules",)),
    ("verl", ("actor_rollout_ref",)),
    ("roll", ("actor_train", "sft_train", "student", "student_train", "dpo_train", "strategy_args", "pretrain")),
    ("nemo_rl", ("policy",)),
    ("megatron_yaml", ("language_model", "model_parallel")),
    ("bridge", ("model", "ddp")),
    ("bridge", ("model", "optimizer", "train")),
    ("ms_swift", ("tuner_type",)),
    ("ms_swift", ("train_type",)),
    ("ms_swift", ("micro_batch_size", "model")),
)
"""The keys of a file by framework: all of them for the last five, one of them for the others."""
_ANY: Final = frozenset({"roll"})


def framework_of(tree: Mapping[str, object]) -> str | None:
    """The framework whose keys a file has."""
    for name, keys in _KEYS:
        if (any if name in _ANY else all)(key in tree for key in keys):
            return name
    defaults = tree.get("defaults")
    named = [defaults] if isinstance(defaults, str) else defaults if isinstance(defaults, list) else []
    return "nemo_rl" if any(str(each).endswith((".yaml", ".yml")) for each in named) else None
