"""The options of this program. All begin with --info-, so they cannot clash with options of Megatron or torchrun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from analyzer.errors import InputError
from analyzer.units import parse_size

PREFIX: Final = "--info-"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """Values of the --info options, one field each."""

    engine: Literal["formula", "shadow", "both"] = "formula"
    gpu: str | None = None
    gpu_memory: int | None = None
    """Bytes."""
    json: str | None = None
    """A file, or '-' for standard output."""
    detail: tuple[str, ...] = ()
    """Sections of the console report to print in full."""
    record: str | None = None
    allocator: Literal["pool", "malloc"] | None = None
    """Allocation function of the CUDA recorder: cudaMallocAsync (pool, and the default) or cudaMalloc (malloc)."""
    check: str | None = None
    tolerance: float = 0.01
    rank: int | None = None
    """The global rank to record; None for the highest-memory rank."""
    layers: int | None = None
    """Number of decoder layers to record; None for all."""
    moe_imbalance: float = 1.0
    """Tokens of the experts of the highest-memory rank, relative to the mean."""
    launch: bool = False
    megatron: str | None = None


CHOICES: Final = {
    "engine": ("formula", "shadow", "both"),
    "detail": ("summary", "memory", "groups", "communication", "tree", "full"),
    "allocator": ("pool", "malloc"),
}
SEVERAL: Final = frozenset({"detail"})
"""Fields that take several choices, separated by commas."""
FLAGS: Final = {PREFIX + field.replace("_", "-"): field for field in InfoOptions.__slots__}

HELP: Final = {
    "engine": "formulas (default), a run of megatron-core on tensors without data, or a comparison of both",
    "gpu": "target GPU, such as H100-80GB (default: the local GPU)",
    "gpu_memory": "memory of the target GPU, such as 80GiB",
    "json": "write the report as JSON to this file; - is standard output",
    "detail": "sections of the report to print in full, separated by commas",
    "record": "run training steps of one rank and write the trace to this file",
    "allocator": "allocation function for --info-record on a GPU (default: pool)",
    "check": "compare the formulas with the trace in this file",
    "tolerance": "relative difference above which a check fails (default: 0.01)",
    "rank": "rank for --info-record (default: the highest-memory rank)",
    "layers": "number of decoder layers for --info-record (default: all)",
    "moe_imbalance": "tokens of the experts of the highest-memory rank, relative to the mean (default: 1)",
    "launch": "start the training if the launch fits",
    "megatron": "Megatron-LM checkout, or a release such as 0.16.1 or 2023",
}
"""Help text of each option, one line each."""


def usage() -> str:
    """The text of `--help`."""
    lines = [
        "get_training_info.py [torchrun options] [pretrain_gpt.py] [Megatron options] [--info options]",
        "",
        "Predicts the memory of each GPU of a Megatron-LM launch, whether it fits, and which ranks communicate.",
        "Options of torchrun and Megatron keep their meaning. Options of this program:",
        "",
    ]
    for flag, field in FLAGS.items():
        if field not in HELP:
            continue
        choices = "LIST" if field in SEVERAL else "|".join(CHOICES.get(field, ("VALUE",)))
        value = f" {choices}" if takes_value(flag) else ""
        lines.append(f"  {flag + value:<38} {HELP[field]}")
    lines += [
        "",
        "Exit status: 0 the launch fits or no GPU is known, 1 it does not fit, 2 invalid or unsupported input, 3 a check failed.",
    ]
    return "\n".join(lines)


def takes_value(flag: str) -> bool:
    """Whether `flag` takes a value. Raises InputError for an unknown --info option."""
    if flag not in FLAGS:
        raise InputError(flag, "is not an option", f"did you mean {_nearest(flag)}?")
    return FLAGS[flag] != "launch"


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The value of an --info option in `argv`, of several the last; None if it is not given or has no value."""
    value = None
    for position, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name == flag:
            value = attached if equals else next(iter(argv[position + 1 :]), None)
    return value


def read_info_options(pairs: Iterable[tuple[str, str | None]]) -> InfoOptions:
    """Reads (flag, value) pairs. Of several equal flags the last one wins. Raises InputError for a missing or invalid value."""
    options = InfoOptions()
    for flag, word in pairs:
        options = replace(options, **{FLAGS[flag]: _value(flag, word)})
    return options


def _value(flag: str, word: str | None) -> Any:
    field = FLAGS[flag]
    if not takes_value(flag):
        if word is not None:
            raise InputError(flag, f"takes no value, and {word!r} is given", f"write {flag} without a value")
        return True
    if not word:
        raise InputError(flag, "has no value", f"write {flag} {'|'.join(CHOICES.get(field, ('VALUE',)))}")
    if field in SEVERAL:
        return _several(flag, word, choices=CHOICES[field])
    if field in CHOICES and word not in CHOICES[field]:
        raise InputError(flag, f"{word!r} is not a valid choice", f"use {' or '.join(CHOICES[field])}")
    if field == "gpu_memory":
        return _size(flag, word)
    if field == "tolerance":
        return _tolerance(flag, word)
    if field in ("rank", "layers"):
        return _number(flag, word, least=0 if field == "rank" else 1)
    if field == "moe_imbalance":
        return _imbalance(flag, word)
    return word


def _several(flag: str, word: str, *, choices: Sequence[str]) -> tuple[str, ...]:
    """The sections in a comma-separated list. `summary` is the report without further sections."""
    words = tuple(each.strip() for each in word.split(","))
    for each in words:
        if each not in choices:
            raise InputError(flag, f"{each!r} is not a section of the report", f"use {', '.join(choices[:-1])} or {choices[-1]}")
    return tuple(each for each in words if each != "summary")


def _size(flag: str, word: str) -> int:
    try:
        return parse_size(word)
    except ValueError as error:
        fault = f"{word!r} is not a memory size" + (f": {error}" if "any GPU" in str(error) else "")
        raise InputError(flag, fault, "write a size with a unit, such as 80GiB or 80GB") from None


def _number(flag: str, word: str, *, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise InputError(flag, f"{word!r} is not an integer of {least} or more", f"write an integer such as {least + 1}")
    return int(word)


def _tolerance(flag: str, word: str) -> float:
    try:
        tolerance = float(word)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < 1:
        raise InputError(flag, f"{word!r} is not a number from 0 to below 1", "write a number such as 0.01")
    return tolerance


def _imbalance(flag: str, word: str) -> float:
    try:
        imbalance = float(word)
    except ValueError:
        imbalance = 0.0
    if not 1 <= imbalance < float("inf"):
        raise InputError(flag, f"{word!r} is not a number of 1 or more", "write a number such as 1.5")
    return imbalance


def _nearest(flag: str) -> str:
    from difflib import get_close_matches

    existing = [name for name, field in FLAGS.items() if field in HELP]
    return (get_close_matches(flag, existing, n=1, cutoff=0.0) or [PREFIX + "detail"])[0]
