"""Our own options. All begin with --info-, so that they never collide with Megatron's or torchrun's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from analyzer.errors import InputError
from analyzer.units import parse_size

PREFIX: Final = "--info-"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """What to do with the launch: one field for each --info option."""

    engine: Literal["formula", "shadow", "both"] = "formula"
    gpu: str | None = None
    gpu_memory: int | None = None
    """Bytes."""
    json: str | None = None
    """A file, or '-' for standard output."""
    detail: Literal["summary", "full"] = "summary"
    """summary or full."""
    record: str | None = None
    allocator: Literal["pool", "malloc"] | None = None
    """What the CUDA recorder allocates with: cudaMallocAsync's pool, which None means too, or cudaMalloc."""
    check: str | None = None
    tolerance: float = 0.01
    rank: int | None = None
    """The global rank to record; None is the fullest one."""
    layers: int | None = None
    """Decoder layers to record, where the whole model would not fit."""
    moe_imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean."""
    launch: bool = False
    megatron: str | None = None


CHOICES: Final = {"engine": ("formula", "shadow", "both"), "detail": ("summary", "full"), "allocator": ("pool", "malloc")}
FLAGS: Final = {PREFIX + field.replace("_", "-"): field for field in InfoOptions.__slots__}

HELP: Final = {
    "engine": "formulas (default), a run of the real megatron-core without a GPU, or both held against each other",
    "gpu": "the target GPU, such as H100-80GB; without it the local one",
    "gpu_memory": "its memory, such as 80GiB",
    "json": "the report as JSON; - is standard output",
    "detail": "summary (default) or full",
    "record": "run the step of one rank and write its trace",
    "allocator": "what a recording on the GPU allocates with",
    "check": "hold the formulas against a trace",
    "tolerance": "relative difference from which a check fails (0.01)",
    "rank": "the rank to record; without it the fullest",
    "layers": "record a model of so many layers",
    "moe_imbalance": "tokens of the fullest rank's experts over the mean",
    "launch": "after a verdict of 'fits', start the training",
    "megatron": "a Megatron-LM checkout, or a release such as 0.16.1 or 2023",
}
"""What each option does, in a line; those that do not exist yet are not here."""


def usage() -> str:
    """What `--help` prints."""
    lines = [
        "get_training_info.py [torchrun options] [pretrain_gpt.py] [Megatron options] [--info options]",
        "",
        "What a Megatron-LM launch will hold on each GPU, whether it fits and who talks to whom.",
        "torchrun's and Megatron's options mean what they mean to them. Those of this program:",
        "",
    ]
    for flag, field in FLAGS.items():
        if field not in HELP:
            continue
        value = f" {'|'.join(CHOICES.get(field, ('VALUE',)))}" if takes_value(flag) else ""
        lines.append(f"  {flag + value:<38} {HELP[field]}")
    lines += ["", "Exit status: 0 fits or no GPU is known, 1 does not fit, 2 wrong or unsupported input, 3 a check failed."]
    return "\n".join(lines)


def takes_value(flag: str) -> bool:
    """Whether a word follows `flag`. Raises InputError for a flag that is not ours."""
    if flag not in FLAGS:
        raise InputError(flag, "there is no such option", f"did you mean {_nearest(flag)}?")
    return FLAGS[flag] != "launch"


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The value that follows one of our flags, the last of several; None where it is not given or has none."""
    value = None
    for position, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name == flag:
            value = attached if equals else next(iter(argv[position + 1 :]), None)
    return value


def read_info_options(pairs: Iterable[tuple[str, str | None]]) -> InfoOptions:
    """The options that (flag, value) pairs set, the last of several winning. A value of None is a missing one."""
    options = InfoOptions()
    for flag, word in pairs:
        options = replace(options, **{FLAGS[flag]: _value(flag, word)})
    return options


def _value(flag: str, word: str | None) -> Any:
    field = FLAGS[flag]
    if not takes_value(flag):
        if word is not None:
            raise InputError(flag, f"takes no value, and got {word!r}", f"write {flag} alone")
        return True
    if not word:
        raise InputError(flag, "has no value", f"write {flag} {'|'.join(CHOICES.get(field, ('VALUE',)))}")
    if field in CHOICES and word not in CHOICES[field]:
        raise InputError(flag, f"{word!r} is not a choice", f"use {' or '.join(CHOICES[field])}")
    if field == "gpu_memory":
        return _size(flag, word)
    if field == "tolerance":
        return _tolerance(flag, word)
    if field in ("rank", "layers"):
        return _number(flag, word, least=0 if field == "rank" else 1)
    if field == "moe_imbalance":
        return _imbalance(flag, word)
    return word


def _size(flag: str, word: str) -> int:
    try:
        return parse_size(word)
    except ValueError as error:
        fault = f"{word!r} is not a size of memory" + (f": {error}" if "unit, as" in str(error) else "")
        raise InputError(flag, fault, "write one such as 80GiB or 80GB") from None


def _number(flag: str, word: str, *, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise InputError(flag, f"{word!r} is not a whole number from {least} on", f"write one such as {least + 1}")
    return int(word)


def _tolerance(flag: str, word: str) -> float:
    try:
        tolerance = float(word)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise InputError(flag, f"{word!r} is not a share between 0 and 1", "write one such as 0.01")
    return tolerance


def _imbalance(flag: str, word: str) -> float:
    try:
        imbalance = float(word)
    except ValueError:
        imbalance = 0.0
    if not 1 <= imbalance < float("inf"):
        raise InputError(flag, f"{word!r} is not a number of 1 or more", "write one such as 1.5")
    return imbalance


def _nearest(flag: str) -> str:
    from difflib import get_close_matches

    existing = [name for name, field in FLAGS.items() if field in HELP]
    return (get_close_matches(flag, existing, n=1, cutoff=0.0) or [PREFIX + "detail"])[0]
