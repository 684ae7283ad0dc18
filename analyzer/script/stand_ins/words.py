"""Splits the words of a wrapper, such as srun, into its options and the command that it starts."""

from __future__ import annotations

MAX_DIGITS = 9
"""Digits of a number of nodes or processes."""


class Syntax:
    """The options of a program, as far as it matters where the command begins.

    `flags`: long options without a value, without their dashes. `attached`: long options whose value, if any, is attached by `=`.
    Any other long option takes the next word unless its value is attached. `short`: letters of short options with a value.
    `single`: names of options that may have one dash, as those of mpirun.
    """

    def __init__(self, *, flags: str = "", short: str = "", single: str = "", attached: str = "") -> None:
        self.flags = frozenset(flags.split())
        self.short = frozenset(short)
        self.single = frozenset(single.split())
        self.attached = frozenset(attached.split())


def split_words(words: list[str], syntax: Syntax) -> tuple[list[tuple[str, str]], list[str]]:
    """The options (name without dashes, value or "") before the command, and the command with its arguments."""
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return options, words[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        position += 1
        name, equals, value = word.lstrip("-").partition("=")
        long = word.startswith("--") or name in syntax.single
        if not long and not (syntax.single and len(name) > 1):
            taken = _short(word[1:], words[position : position + 1], syntax, options)
            position += taken
        elif equals or name in syntax.flags or name in syntax.attached:
            options.append((name, value))
        elif position < len(words):
            options.append((name, words[position]))
            position += 1
    return options, words[position:]


def _short(letters: str, following: list[str], syntax: Syntax, options: list[tuple[str, str]]) -> int:
    """Reads letters after one dash, such as `N2`, `it` or `N`. Returns the number of following words that are values."""
    for position, letter in enumerate(letters):
        if letter in syntax.short:
            attached = letters[position + 1 :].removeprefix("=")
            options.append((letter, attached or next(iter(following), "")))
            return 0 if attached else 1
        options.append((letter, ""))
    return 0


def last(options: list[tuple[str, str]], *names: str) -> str | None:
    """The value of the last of the options `names`; None without one."""
    found = [value for name, value in options if name in names]
    return found[-1] if found else None


def whole(text: str | None) -> int | None:
    """The first number of `8`, `2-4` or `2k`; None if there is none."""
    digits = ""
    for character in text or "":
        if not character.isdecimal():
            break
        digits += character
    return (int(digits) or None) if 0 < len(digits) <= MAX_DIGITS else None
