"""Reading the printed report: its sections, its sizes, and checks that printed parts add up to printed sums."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(r"(-?[\d,]+(?:\.\d+)?) (B|[KMGT]iB)\b")


def titles(text: str) -> tuple[str, ...]:
    """The titles of the sections."""
    return tuple(line.removeprefix("── ").rstrip("─ ") for line in text.splitlines() if line.startswith("── "))


def section(text: str, title: str) -> list[str]:
    """The lines of the first section whose title begins with `title`."""
    lines = text.splitlines()
    start = next(i for i, each in enumerate(lines) if each.startswith(f"── {title}"))
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("── ")), len(lines))
    return lines[start + 1 : end]


def sizes(line: str) -> list[float]:
    """The sizes of a line in bytes."""
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in SIZE.findall(line)]


def _rounding(line: str) -> list[float]:
    """The maximum difference of each printed size from the exact one: half of its last digit."""
    return [0.005 * UNITS[unit] for _, unit in SIZE.findall(line)]


def check_memory_table(lines: Sequence[str]) -> int:
    """Asserts that each size in a row with = is the sum of the row of parameters and the rows with +; how many were checked."""
    checked = 0
    total: list[float] = []
    slack: list[float] = []
    for line in lines:
        if re.match(r"    (parameters|weights, \w+)  ", line):
            total, slack = sizes(line), _rounding(line)
        elif line.startswith("  + "):
            total = [a + b for a, b in zip(total, sizes(line), strict=True)]
            slack = [a + b for a, b in zip(slack, _rounding(line), strict=True)]
        elif line.startswith("  = "):
            allowed = [a + b for a, b in zip(slack, _rounding(line), strict=True)]
            assert all(abs(a - b) <= c for a, b, c in zip(total, sizes(line), allowed, strict=True)), line
            checked += len(total)
    return checked


def check_parts(lines: Sequence[str]) -> int:
    """Asserts that indented sizes add up to the size above them, below the peak of each rank; how many sums were checked."""
    checked = 0
    start = next(i for i, line in enumerate(lines) if line.startswith("  Peak of rank "))
    for index in range(start, len(lines)):
        title = re.match(r"  (workspaces and caches|temporary tensors at the peak)  ", lines[index])
        if title is None:
            continue
        end = next((i for i in range(index + 1, len(lines)) if not lines[i].startswith("    ")), len(lines))
        parts = lines[index + 1 : end]
        slack = sum(_rounding(line)[-1] for line in (lines[index], *parts))
        assert sum(sizes(line)[-1] for line in parts) == pytest.approx(sizes(lines[index])[-1], abs=slack), lines[index]
        checked += 1
    return checked
