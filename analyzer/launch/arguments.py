"""What a command line says to Megatron, before anything is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arguments:
    """The namespace that Megatron's parser would make of the command line. Lists are tuples."""

    values: Mapping[str, object]
    """Every dest of the release, with its parsed value or its default."""
    given: frozenset[str]
    """Dests that the user set, on the command line or by a checkpoint."""
    spelled: Mapping[str, str]
    """For each given dest, the flag as the user wrote it."""
    release: str
    """The release whose parser read the line: '0.16.1', or '2023' for the code before core 0.3."""
    source: str
    """Where that parser comes from: 'catalogue of Megatron-LM core 0.16.1', or the path of a checkout's arguments.py."""
    entry: str | None
    """The training script that was named, as it was written."""
    assumptions: tuple[str, ...]
    """What was taken for granted, one sentence each."""

    def get(self, dest: str, default: object = None) -> object:
        """The value of `dest`; `default` where this release has no such option."""
        return self.values.get(dest, default)
