"""Readers of the values of --info options. Each takes the option and its word, and raises InputError for an invalid value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.units import MAX_DIGITS, parse_size

_VERSION: Final = re.compile(
    r"(?P<major>\d{1,3})(\.\d{1,6}){1,3}((a|b|rc|\.post|\.dev)\d{1,6}){0,3}(\+[A-Za-z0-9.]{1,60})?", re.ASCII
)
"""A version as in PEP 440, with two to four numbers."""


class Margin(NamedTuple):
    """Memory of a GPU that should remain free: a share of its capacity, or bytes."""

    share: float = 0.0
    bytes: int = 0

    def of(self, capacity: int) -> int:
        """The margin in bytes for a GPU with `capacity` bytes."""
        return self.bytes or int(self.share * capacity)


def word(_name: str, text: str | None) -> str:
    """Any text."""
    return text or ""


def words(name: str, text: str | None) -> tuple[str, ...]:
    """A comma-separated list of words."""
    found = tuple(each.strip() for each in (text or "").split(","))
    if "" in found:
        raise InputError(name, f"{text!r} has an empty entry", "write words separated by commas")
    return found


def options_of_launch(option: str, text: str | None) -> tuple[str, ...]:
    """The value of `--info-set`: options of Megatron with their values. Raises InputError for anything else."""
    remedy = f"write {option} '--tensor-model-parallel-size 4 --sequence-parallel'"
    try:
        found = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise InputError(option, f"cannot be split into words: {str(error).lower()}", remedy) from None
    if not found or not found[0].startswith("--"):
        raise InputError(option, f"{text!r} does not begin with an option", remedy)
    own = next((word for word in found if word.startswith("--info-")), None)
    if own is not None:
        raise InputError(option, f"{own} is an option of this program", "give it beside the launch")
    return found


def version(package: str, example: str, *, newest: int, none: bool = False) -> Callable[[str, str | None], str]:
    """A reader of versions of `package` such as `example`, with a first number up to `newest`; of 'none' too if that is allowed."""
    remedy = f"write a version such as {example}" + (", or none" if none else "")

    def read(name: str, text: str | None) -> str:
        if none and text == "none":
            return text
        found = _VERSION.fullmatch(text or "")
        if found is None:
            raise InputError(name, f"{text!r} is not a version", remedy)
        if int(found["major"]) > newest:
            raise InputError(name, f"{package} {text} is not known", remedy)
        return found.string

    return read


def flag(name: str, text: str | None) -> bool:
    """True; an option that takes no value."""
    if text is not None:
        raise InputError(name, f"takes no value, and {text!r} is given", f"write {name} without a value")
    return True


def choice(*choices: str) -> Callable[[str, str | None], str]:
    """A reader of one of `choices`."""

    def read(name: str, text: str | None) -> str:
        if text not in choices:
            raise InputError(name, f"{text!r} is not a valid choice", f"use {' or '.join(choices)}")
        return text

    return read


def several(*choices: str, what: str = "section of the report", none: str = "") -> Callable[[str, str | None], tuple[str, ...]]:
    """A reader of a comma-separated list of `choices`. `none` is the choice that adds nothing to the list.

    `what` names a choice in the error for another word.
    """

    def read(name: str, text: str | None) -> tuple[str, ...]:
        words = tuple(each.strip() for each in (text or "").split(","))
        for each in words:
            if each not in choices:
                known = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise InputError(name, f"{each!r} is not a {what}", f"use {known}")
        return tuple(each for each in words if each != none)

    return read


def size(name: str, text: str | None) -> int:
    """A memory size in bytes."""
    try:
        return parse_size(text or "")
    except ValueError as error:
        fault = f"{text!r} is not a memory size" + (f": {error}" if "any GPU" in str(error) else "")
        raise InputError(name, fault, "write a size with a unit, such as 80GiB or 80GB") from None


def margin(name: str, text: str | None) -> Margin:
    """A share of the capacity of a GPU from 0% to below 100%, or a memory size."""
    number, per_cent, rest = (text or "").strip().partition("%")
    value = _number(number)
    if per_cent and not rest and value is not None and 0 <= value < 100:
        return Margin(share=value / 100)
    try:
        return Margin(bytes=parse_size(text or ""))
    except ValueError:
        fault = f"{text!r} is neither a share from 0% to below 100% nor a memory size"
        raise InputError(name, fault, "write a value such as 5% or 4GiB") from None


def integer(least: int) -> Callable[[str, str | None], int]:
    """A reader of integers of `least` or more."""

    def read(name: str, text: str | None) -> int:
        if text is None or not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < least:
            raise InputError(name, f"{text!r} is not an integer of {least} or more", f"write an integer such as {least + 1}")
        return int(text)

    return read


def integers(least: int) -> Callable[[str, str | None], tuple[int, ...]]:
    """A reader of a comma-separated list of integers of `least` or more."""
    one = integer(least)

    def read(name: str, text: str | None) -> tuple[int, ...]:
        return tuple(one(name, each.strip()) for each in (text or "").split(","))

    return read


def lora(name: str, text: str | None) -> tuple[int, tuple[str, ...]]:
    """A rank, and after a colon the names of linear layers."""
    rank, colon, listed = (text or "").partition(":")
    return integer(1)(name, rank), words(name, listed) if colon else ()


def share(name: str, text: str | None) -> float:
    """A number from 0 to below 1."""
    value = _number(text)
    if value is None or not 0 <= value < 1:
        raise InputError(name, f"{text!r} is not a number from 0 to below 1", "write a number such as 0.01")
    return value


def number_from(least: float) -> Callable[[str, str | None], float]:
    """A reader of finite numbers of `least` or more."""

    def read(name: str, text: str | None) -> float:
        value = _number(text)
        if value is None or not least <= value < float("inf"):
            raise InputError(name, f"{text!r} is not a number of {least:g} or more", f"write a number such as {least + 0.5:g}")
        return value

    return read


SMALLEST: Final = 1e-6
LARGEST: Final = 1e9


def positive(name: str, text: str | None) -> float:
    """A number above 0, within bounds that keep times finite."""
    value = _number(text)
    if value is None or not SMALLEST <= value <= LARGEST:
        raise InputError(name, f"{text!r} is not a number from {SMALLEST:g} to {LARGEST:g}", "write a number such as 2.5")
    return value


_SCALES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def count(name: str, text: str | None) -> int:
    """A number of things with an optional suffix K, M, B or T: 15T."""
    written = (text or "").strip().upper()
    digits = written.rstrip("KMBGT")
    value = _number(digits)
    scale = _SCALES.get(written[len(digits) :])
    if value is None or scale is None or not 1 <= value * scale < 10**18:
        raise InputError(name, f"{text!r} is not a number from 1 to 10^18", "write a number such as 15T or 300B")
    return round(value * scale)


def shares(*names: str) -> Callable[[str, str | None], tuple[tuple[str, float], ...]]:
    """A reader of a comma-separated list of NAME=SHARE, each share from 1e-6 to 1. The first of `names` must be given."""

    def read(option: str, text: str | None) -> tuple[tuple[str, float], ...]:
        found: dict[str, float] = {}
        remedy = "write " + ",".join(f"{each}=0.5" for each in names)
        for part in (text or "").split(","):
            key, _, number = part.partition("=")
            value = _number(number)
            if key.strip() not in names or value is None or not SMALLEST <= value <= 1:
                raise InputError(option, f"{part!r} is not one of {', '.join(names)} with a share from {SMALLEST:g} to 1", remedy)
            found[key.strip()] = value
        if names[0] not in found:
            raise InputError(option, f"it does not give {names[0]}", remedy)
        return tuple(found.items())

    return read


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
