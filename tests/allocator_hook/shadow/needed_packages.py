"""The packages without which tests of the shadow engine are skipped."""

from __future__ import annotations

from importlib import metadata

import pytest


def missing() -> list[str]:
    """Return the packages of the shadow extra that are not installed."""
    found = []
    for package in ("torch", "megatron-core", "transformer-engine"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            found.append(package)
    return found


NEEDS_SHADOW = [
    pytest.mark.shadow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]
