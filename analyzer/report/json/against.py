"""The field `against` of the JSON report (`--info-against`)."""

from __future__ import annotations

from typing import Any, Final

from analyzer.report.against import Against, Change
from analyzer.report.json.encoder import SPREAD, Formats, encode, named


def against_json(result: Against) -> dict[str, Any]:
    """The changes as values for the `json` module."""
    document: dict[str, Any] = encode(result, FORMATS)
    return document


def _changed(result: Against) -> bool:
    return bool(result.sections)


def _percent(change: Change) -> float | None:
    return None if change.percent is None else round(change.percent, 2)


FORMATS: Final[Formats] = {
    Against: {"file": "file", "changed": _changed, SPREAD: "sections"},
    Change: {**named("field old new difference"), "percent": _percent},
}
