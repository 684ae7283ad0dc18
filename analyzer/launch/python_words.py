"""The words of a launch that is given in Python: as one text, or as a list of texts, numbers and paths."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from analyzer.errors import InputError

Word = str | int | float | os.PathLike[str]
"""An item of a list of words."""


def words_of(argv: str | Sequence[Word], gpu: str | None) -> list[str]:
    """The words of a launch. Raises InputError for a quotation that does not end, for items that are no words, and for --help."""
    try:
        words = shlex.split(argv) if isinstance(argv, str) else [_word(item) for item in _items(argv)]
    except ValueError as error:
        fault = f"cannot be split into words: {str(error).lower()}"
        raise InputError("argv", fault, "close the quotation, or give a list") from None
    for option in ("--help", "-h", *(["--version"] if words[:1] == ["--version"] else [])):
        if option in words:
            raise InputError(option, "belongs to the command line", "leave it out, or run get-training-info with it")
    return words if gpu is None else [*words, "--info-gpu", gpu]


def _items(argv: Sequence[Word]) -> list[Word]:
    if isinstance(argv, bytes | Mapping) or not isinstance(argv, Iterable):
        raise InputError("argv", f"is of type {type(argv).__name__}", "give a string or a list of words")
    return list(argv)


def _word(item: Word) -> str:
    """A text, number or path as a word. Raises InputError for anything else."""
    if isinstance(item, str):
        return item
    if isinstance(item, Integral | float) and not isinstance(item, bool):
        return str(item)
    if isinstance(item, os.PathLike) and isinstance(path := os.fspath(item), str):
        return path
    fault = f"has the item {item!r:.60} of type {type(item).__name__}"
    raise InputError("argv", fault, "give texts, numbers and paths; an option without a value is one text")
