"""How many examples the property-based tests of this folder draw.

The variable FUZZ is `quick` for a few launches (`make fast`), or the number of launches of each large property (`make fuzz`). With
a number the examples differ in every run unless `--hypothesis-seed` is given; otherwise they are always the same.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

FUZZ: Final = os.environ.get("FUZZ", "")
LAUNCHES: Final = {"": 150, "quick": 12}.get(FUZZ) or int(FUZZ)


def examples(share: float) -> settings:
    """Settings with `share` of the launches as examples."""
    return settings(
        max_examples=max(2, round(LAUNCHES * share)),
        deadline=None,
        derandomize=FUZZ in ("", "quick"),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
