"""Control characters in text from files, options and the environment, which could change a terminal or hide other text."""

from __future__ import annotations

import re
from typing import Final

_BIDI_AND_SEPARATORS: Final = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Marks, embeddings, overrides and isolates of the direction of text, and separators of lines and paragraphs."""
_INVISIBLE: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{_BIDI_AND_SEPARATORS}]")
_EXCEPT_LINES: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI_AND_SEPARATORS}]")
"""The same without tabs and line feeds."""
_IN_JSON: Final = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI_AND_SEPARATORS}]")


def visible(text: str, *, lines: bool = False) -> str:
    """The text with escapes such as \\x1b in the place of control characters. `lines`: it has line feeds and tabs, which stay."""
    return (_EXCEPT_LINES if lines else _INVISIBLE).sub(_escaped, text)


def visible_json(document: str) -> str:
    """A JSON document with JSON's escapes in the place of control characters in its strings, which mean the same."""
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
