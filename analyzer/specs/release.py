"""Comparable release numbers of Megatron."""

from __future__ import annotations


def release_number(release: str) -> tuple[int, ...]:
    """A release as a tuple: (0, 16, 1) for '0.16.1', and (0, 2, 0), the core version of that year, for '2023'."""
    if release == "2023":
        return (0, 2, 0)
    return tuple(int(part) for part in release.split(".") if part.isdigit())
