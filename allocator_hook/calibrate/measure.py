"""Measures items one after the other within a time budget. One that fails is reported and does not end the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from allocator_hook.calibrate.items import Item, Measured, kind_of

MAX_REASON: Final = 160
"""Characters of an error message that are reported."""
Show = Callable[[int, int, str], None]
"""Called with the items that are done, all items, and what is measured."""


class Runner(Protocol):
    """Runs kernels."""

    @property
    def fuses_addition(self) -> bool:
        """Whether 16-bit weight gradients are added to an fp32 buffer in the GEMM."""

    def warm_up(self) -> None:
        """Brings the GPU to the clock rate of a GPU at work."""

    def time(self, item: Item) -> float:
        """Seconds of the item. Raises Unmeasurable, or any other exception, if it cannot run here."""


class Unmeasurable(Exception):
    """An item cannot be measured on this machine; the message is the reason."""


@dataclass
class Measurements:
    """What was measured, and why other items were not."""

    done: list[Measured] = field(default_factory=list)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Numbers of items by kind and reason."""

    def sentences(self) -> list[str]:
        """What was not measured, a sentence for each kind and reason."""
        return [
            f"{kind}: {reason}" if count == 1 else f"{kind} ({count} shapes): {reason}"
            for (kind, reason), count in self.failures.items()
        ]


def measure(
    standard: Sequence[Item],
    launch: Sequence[Item],
    runner: Runner,
    *,
    budget: float,
    show: Show,
    now: Callable[[], float] = time.monotonic,
) -> Measurements:
    """Measures the standard set and the kernels of a launch, each kernel once, for `budget` seconds.

    The standard set may take half of the budget if there are kernels of a launch, and the kernels of the launch the rest.
    """
    found = Measurements()
    own = set(launch)
    first = [item for item in standard if item not in own]
    total, start = len(first) + len(launch), now()
    limits = ((first, start + (budget / 2 if launch else budget)), (launch, start + budget))
    place = 0
    for items, end in limits:
        for item in items:
            show(place, total, kind_of(item))
            place += 1
            if now() > end:
                found.failures[kind_of(item), f"the time of {budget:.0f} s was over"] += 1
                continue
            seconds = _attempt(item, runner, found)
            if seconds is not None:
                found.done.append(Measured(item, seconds, item in own))
    show(total, total, "")
    return found


def _attempt(item: Item, runner: Runner, found: Measurements) -> float | None:
    """Seconds of an item; None after a failure, which is noted."""
    try:
        seconds = runner.time(item)
    except Exception as error:
        found.failures[kind_of(item), reason_of(error)] += 1
        return None
    if not seconds > 0:
        found.failures[kind_of(item), "the clock showed no time"] += 1
        return None
    return seconds


def reason_of(error: Exception) -> str:
    """The first line of an error, with its type unless the error is one of this package."""
    line = next(iter(str(error).strip().splitlines()), "")
    text = line if isinstance(error, Unmeasurable) else f"{type(error).__name__}: {line}"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
