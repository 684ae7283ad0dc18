"""Releases of Megatron as numbers that compare."""

from __future__ import annotations


def release_number(release: str) -> tuple[int, ...]:
    """'0.16.1' as (0, 16, 1), so that releases compare; '2023' as the core package of that year, (0, 2, 0)."""
    if release == "2023":
        return (0, 2, 0)
    return tuple(int(part) for part in release.split(".") if part.isdigit())
