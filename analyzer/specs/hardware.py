"""The target GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """The GPU that the launch is held against; all None where none is named and none is at hand."""

    name: str | None = None
    capacity_bytes: int | None = None
    """Memory that the driver reports as total."""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
