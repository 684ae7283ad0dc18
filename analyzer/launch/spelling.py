"""Recognizes misspelled options."""

from __future__ import annotations

from collections.abc import Iterable


def is_misspelling(word: str, known: str) -> bool:
    """Whether `word` differs from `known` by one inserted, removed, replaced or transposed letter, or in dashes and underscores."""
    if word == known:
        return False
    if _plain(word) == _plain(known):
        return True
    if abs(len(word) - len(known)) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(word, known, strict=False)) if a != b), min(len(word), len(known)))
    rest, other = word[start:], known[start:]
    return rest[1:] == other[1:] or rest[1:] == other or rest == other[1:] or (rest[2:] == other[2:] and rest[:2] == other[1::-1])


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.75) -> str | None:
    """The most similar of `known` words, or None if none is similar."""
    from difflib import get_close_matches

    found = get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else None


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()
