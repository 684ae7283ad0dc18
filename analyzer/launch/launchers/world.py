"""The processes of a launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError

USUAL_GPUS_PER_NODE: Final = 8
OVERRIDE: Final = "--info-world-size"
PER_NODE: Final = "--info-gpus-per-node"
LARGEST_COUNT: Final = 10**9
"""Largest number of nodes or of processes."""


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a launch, one for each GPU."""

    nodes: int
    gpus_per_node: int
    assumptions: tuple[str, ...] = ()
    """Assumptions about sizes that the launcher's options do not give, one sentence each."""
    elastic: tuple[str, int] | None = None
    """The option with which the number of nodes may be smaller, as written, and the smallest number."""

    @classmethod
    def of(cls, size: int) -> World:
        """A world of `size` ranks, with eight GPUs per node or fewer."""
        gpus_per_node = math.gcd(size, USUAL_GPUS_PER_NODE)
        return cls(size // gpus_per_node, gpus_per_node)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.gpus_per_node


Given = Mapping[str, tuple[str, str]]
"""Value and flag as written of each option; the value is empty if it is missing."""


def count(value: str, option: str, what: str) -> int:
    """A positive integer. Raises InputError, whose remedy names --info-world-size if the value is missing."""
    if not value:
        remedy = f"write {option} with a number of {what}, or give the total number of GPUs with {OVERRIDE} N"
        raise InputError(option, "has no value", remedy)
    try:
        number = int(value)
    except ValueError:
        raise InputError(
            option, f"{value!r} is not an integer", f"write a number of {what}, such as 8, or give {OVERRIDE} N"
        ) from None
    if number > LARGEST_COUNT:
        raise InputError(option, f"{value} is above {LARGEST_COUNT}", f"write a number of {what}, such as 8")
    if number < 1:
        raise InputError(option, f"{value} is not above 0", f"write a number of {what}, such as 8, or give {OVERRIDE} N")
    return number
