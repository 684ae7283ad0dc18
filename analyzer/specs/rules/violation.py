"""A rule that a job breaks, and what remedies need."""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """A rule that a job breaks."""

    options: tuple[str, ...]
    """Dests of the options at fault; several for a product of sizes."""
    fault: str
    remedy: str


def multiple_near(value: int, factor: int) -> int:
    """The multiple of `factor` next to `value`, at least one `factor`: what a remedy can propose."""
    return max(1, round(value / factor)) * factor
