"""Reports of the command line that several tests compare with."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.command import report


@cache
def known_report(*argv: str) -> dict[str, Any]:
    """The JSON report of a launch, calculated once. Tests do not change it."""
    return report(*argv)
