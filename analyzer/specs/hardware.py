"""The target GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MULTIPROCESSORS: Final = 132
"""Those of an H100, which are assumed if no GPU is given or a user's file does not tell."""


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """The target GPU. Every field is None if no GPU is given and no local GPU is found."""

    name: str | None = None
    capacity_bytes: int | None = None
    """Memory available to a process: the total of `cudaMemGetInfo`."""
    margin_bytes: int = 0
    """Memory that should remain free: with less headroom a launch is tight."""
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's Instinct GPUs, whose compute capability is the number of their architecture."""
        return (self.name or "").startswith("MI")
