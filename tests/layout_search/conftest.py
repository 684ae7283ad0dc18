"""The random spaces that the tests of this folder look at.

`make fast` looks at a few, and `make test` at 200. With a number in the variable FUZZ it is that number, from the seed FIRST_SEED.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.layout_search.every_layout import Every, every_layout
from tests.layout_search.random_spaces import FIXED

FUZZ: Final = os.environ.get("FUZZ", "")
SPACES: Final = int(FUZZ) if FUZZ.isdigit() else 200
FAST: Final = 3
"""Random spaces of the tests that are not slow."""
SLOW: Final = (
    *("overlap", "overlap-experts", "overlap-little-memory", "overlap-virtual", "overlapped-experts"),
    *("experts", "fp8", "order", "no-sequence"),
)
"""The fixed spaces among the slow tests. Each of their dimensions is in another one of the quick tests."""
NAMES: Final = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FIXED]
FIRST_SEED: Final = int(os.environ.get("FIRST_SEED", "0"))
SEEDS: Final = [
    pytest.param(FIRST_SEED + number, marks=[pytest.mark.slow] if number >= FAST else [], id=str(FIRST_SEED + number))
    for number in range(SPACES)
]


@pytest.fixture(scope="session", params=[*NAMES, *SEEDS])
def every(request: pytest.FixtureRequest) -> Every:
    """A space, and all layouts of it. All tests of a space run before those of the next."""
    return every_layout(request.param)
