"""Violated rules, and values for remedies."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """A rule that a job breaks."""

    options: tuple[str, ...]
    """Dests of the invalid options; several for a product of sizes."""
    fault: str
    remedy: str
    library: str = ""
    """The release of a library that the rule is of, such as Transformer Engine 2.11. Another release may not have it, so that the
    launch is analyzed with a warning. Empty for a rule of Megatron-LM."""


def multiple_near(value: int, factor: int) -> int:
    """The multiple of `factor` nearest to `value`, at least `factor`; for use in remedies."""
    return max(1, round(value / factor)) * factor
