"""Data that is not part of this repository: measurements and dumps of the real Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


def shared(name: str) -> Path:
    """The path of ../shared/NAME; skips the test where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not at hand")
    return path
