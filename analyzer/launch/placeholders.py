"""Placeholders of example scripts, such as `--save your model save path`, whose words the shell has split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.launch.argv_parser import is_option

_FIRST: Final = "your"
"""The first word of the placeholders in the examples of MindSpeed-LLM."""


def with_whole_placeholders(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`words` with each placeholder as one word, and one sentence for each. Megatron itself refuses the additional words."""
    joined: list[str] = []
    sentences: list[str] = []
    position = 0
    while position < len(words):
        flag = words[position]
        end = position + 1
        while end < len(words) and not is_option(words[end]):
            end += 1
        values = list(words[position + 1 : end])
        if is_option(flag) and len(values) > 1 and values[0].lower() == _FIRST:
            values = [" ".join(values)]
            sentences.append(f"{flag} {values[0]!r} is a placeholder of several words: Megatron needs a path there, or quotes.")
        joined += [flag, *values]
        position = end
    return tuple(joined), tuple(sentences)
