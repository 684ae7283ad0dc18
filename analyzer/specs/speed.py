"""Speeds of a GPU and of the links between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SpeedSpec:
    """Peak speeds of a GPU, from its data sheet."""

    name: str
    architecture: str
    """Selects efficiencies: volta, ampere, hopper, blackwell or cdna."""
    peak_flops: Mapping[str, float]
    """Dense floating-point operations per second, by the bits of the factors: 32, 16, 8, 4."""
    hbm_bytes: float
    """Bytes per second of the GPU memory."""
    nvlink_bytes: float
    """Bytes per second of one GPU in one direction, to the GPUs of its NVLink domain."""
    nvlink_domain: int
    """Number of GPUs that NVLink connects."""
    network_bytes: float
    """Bytes per second of one GPU in one direction, to other domains."""
    pod: int = 0
    """Number of GPUs that the network connects at `network_bytes`, such as those of the leaf switches of a rail; 0 for all."""
    spine_bytes: float = 0.0
    """Bytes per second of one GPU in one direction to other pods, if all GPUs send at the same time."""
    multiprocessors: int
    integer_ops: Mapping[str, float] = field(default_factory=dict)
    """Dense integer operations per second by the bits of the factors, 8 and 4; empty if they are not known."""

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_bytes, self.nvlink_bytes, self.network_bytes, self.pod, self.spine_bytes))
