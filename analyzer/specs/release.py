"""Names and comparable numbers of Megatron releases."""

from __future__ import annotations

from functools import cache

from analyzer.units import natural


@cache
def release_number(release: str) -> tuple[int, ...]:
    """A release as a tuple: (0, 16, 1) for '0.16.1', and (0, 2, 0), the core version of that year, for '2023'."""
    if release == "2023":
        return (0, 2, 0)
    return tuple(number for part in release.split(".") if (number := natural(part)) is not None)


def is_before(megatron: str, release: str) -> bool:
    """Whether the release `megatron` of a job is older than `release`: '0.7.0' and '2023' are before '0.8'."""
    return release_number(megatron) < release_number(release)


def describe(release: str) -> str:
    """The name of a release for messages: 'Megatron-LM core 0.16.1', 'Megatron-LM of August 2023'."""
    return "Megatron-LM of August 2023" if release == "2023" else f"Megatron-LM core {release}"


def minor(release: str) -> str:
    """Major and minor version of a release: '0.16' for '0.16.1'; '2023' for the code of August 2023."""
    return ".".join(release.split(".")[:2])
