"""Data that is not part of this repository: measurements and dumps of the real Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


def shared(name: str) -> Path:
    """The path of ../shared/NAME; skips the test where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not at hand")
    return path


def truth_records(name: str) -> list[dict[str, Any]]:
    """The records of ../shared/NAME, to parametrize a test with; none where it is absent."""
    path = SHARED / name
    if not path.exists():
        return []
    content: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    return content
