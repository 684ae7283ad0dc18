"""The share of the layouts that a run of the tests compares with the shadow engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

EVERY: Final = int(os.environ.get("SHADOW_EVERY", "1"))
FIRST: Final = int(os.environ.get("SHADOW_FIRST", "0"))
"""CI runs a share of the layouts with each release, so that it stays short: every EVERY-th one from FIRST on."""


def share_of(layouts: Iterable[T]) -> list[T]:
    """Every EVERY-th layout from FIRST on."""
    return list(layouts)[FIRST::EVERY]
