"""How many examples the property-based tests draw: all of them, or a part in the quick tests (`FUZZ=quick`, as in `make fast`)."""

from __future__ import annotations

import os
from typing import Final

QUICK: Final = os.environ.get("FUZZ") == "quick"
DEFAULT: Final = 100
"""Examples of a property that does not name a number; the default of hypothesis."""
_PART: Final = 8
_FEWEST: Final = 5


def examples(count: int) -> int:
    """`count` examples, or a part of them in the quick tests."""
    return min(count, max(_FEWEST, count // _PART)) if QUICK else count
