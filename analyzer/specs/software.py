"""Versions of the libraries that a training runs with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

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
