"""Versions and settings of the libraries that a training runs with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from analyzer.units import KIB, MIB

_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*")


@cache
def version_number(version: str) -> tuple[int, ...]:
    """The release of a version as a tuple: (2, 10, 0) for '2.10.0a0+a36e1d39eb.nv26.01'. Empty if it does not begin with one."""
    found = _RELEASE.match(version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


@dataclass(frozen=True, kw_only=True)
class SoftwareSpec:
    """Transformer Engine and PyTorch of a training."""

    te: str | None
    """The version of Transformer Engine, such as '2.11' or '2.11.0+c188b533'; None if it is not installed."""
    torch: str
    """The version of PyTorch. A development version such as '2.12.0a0' counts as that release."""

    def te_is_before(self, version: str) -> bool:
        """Whether Transformer Engine is older than `version`, such as '2.3', or not installed."""
        return self.te is None or version_number(self.te) < version_number(version)

    def torch_is_before(self, version: str) -> bool:
        """Whether PyTorch is older than `version`, such as '2.12'."""
        return version_number(self.torch) < version_number(version)


@dataclass(frozen=True, kw_only=True)
class NcclSpec:
    """Settings of NCCL in the environment of a launch. The defaults are those of NCCL 2.27 to 2.30."""

    buffer_bytes: int = 4 * MIB
    """A buffer of the protocol Simple (NCCL_BUFFSIZE)."""
    nvlink_chunk: int = 512 * KIB
    """Bytes of a step of a message where NVLink connects all ranks (NCCL_P2P_NVL_CHUNKSIZE)."""
    network_chunk: int = 128 * KIB
    """The same elsewhere (NCCL_P2P_NET_CHUNKSIZE)."""
    fewest_channels: int = 1
    """Of rings and trees (NCCL_MIN_NCHANNELS, NCCL_MIN_CTAS)."""
    most_channels: int = 64
    """The same (NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS)."""
    trees: bool = True
    """NCCL_ALGO allows trees."""
    sharp: bool = True
    """NCCL_NVLS_ENABLE and NCCL_ALGO allow NVLink SHARP."""
    forwards: bool = True
    """The other GPUs of a node forward messages to the network (NCCL_PXN_DISABLE)."""


DEFAULT_NCCL: Final = NcclSpec()
