"""The target GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MULTIPROCESSORS: Final = 132
"""Those of an H100, which are assumed if no GPU is given or a user's file does not tell."""

_FEWER_THREADS: Final = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor by compute capability, where they are not 2048 (CUDA C++ Programming Guide, table of
technical specifications)."""


def resident_threads(compute_capability: tuple[int, int] | None) -> int:
    """The most threads that a multiprocessor has at a time; those of an H100 if no GPU is given."""
    return _FEWER_THREADS.get(compute_capability or (9, 0), 2048)


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
    nvlink_domain: int = 8
    """GPUs that NVLink connects: those of a node, or of a rack."""
    nvlinks: int = 18
    """NVLinks of the GPU; 0 if PCIe connects it with the others of its node."""

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's Instinct GPUs, whose compute capability is the number of their architecture."""
        return (self.name or "").startswith("MI")
