"""Rows of options as argparse describes them, for releases whose parsers are written as differences."""

from __future__ import annotations

from typing import Any


def option(flag: str, **changes: Any) -> dict[str, Any]:
    """Return an option as argparse describes it: a string option with the given `changes`."""
    row = {"flags": [flag], "dest": flag[2:].replace("-", "_"), "kind": "StoreAction", "nargs": None, "const": None,
           "default": None, "type": "str", "choices": None}  # fmt: skip
    return {**row, **changes}


def flag(name: str, dest: str | None = None, *, value: bool = True) -> dict[str, Any]:
    """Return an option without an argument that stores `value`."""
    kind = "StoreTrueAction" if value else "StoreFalseAction"
    row = option(name, kind=kind, nargs=0, const=value, default=not value, type=None)
    return {**row, "dest": dest or row["dest"]}
