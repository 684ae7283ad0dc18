"""The values of `--info-serving` and `--info-serving-search`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from analyzer.errors import InputError
from analyzer.units import length, natural

SERVING_ENGINE: Final = "--info-serving-engine"
SERVING: Final = "--info-serving"
SERVING_SEARCH: Final = "--info-serving-search"
EXAMPLE: Final = "requests=10,chunk=8192,prefix=0.5,draft=3,acceptance=0.7,memory=0.9"
SEARCH_EXAMPLE: Final = "first=500ms,token=30ms"
_NUMBERS: Final = {
    "requests": "requests",
    "chunk": "chunk_tokens",
    "running": "slots",
    "wait": "wait_steps",
    "receive": "receive_steps",
    "captured": "captured_tokens",
    "draft": "draft_tokens",
    "prefill": "prefill_replicas",
}
_SHARES: Final = {
    "fill": "wait_share",
    "prefix": "prefix",
    "acceptance": "acceptance",
    "memory": "memory_share",
    "spread": "spread",
}
_MOST: Final = 10**6
_MOST_DRAFTS: Final = 16
_MOST_REQUESTS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What `--info-serving` gives: values of fields of `ServingSpec`."""

    fields: dict[str, Any] = field(default_factory=dict)


class ServingTarget(NamedTuple):
    """What `--info-serving-search` asks for, in seconds."""

    first: float
    """Longest mean time to the first token."""
    token: float
    """Longest mean time of an output token."""


def serving(option: str, text: str | None) -> Serving:
    """Reads the value of the option. Raises InputError for an unknown or invalid part."""
    found: dict[str, Any] = {}
    for part in (text or "").split(","):
        key, _, value = (each.strip() for each in part.partition("="))
        name, read = _part(option, part, key, value)
        if name in found:
            raise InputError(option, f"{key} is given twice", f"write it once, as in {EXAMPLE}")
        found[name] = read
    if found.get("draft_tokens") and "acceptance" not in found:
        raise InputError(option, "draft needs the probability that a proposed token is accepted", "add acceptance=0.7")
    if "acceptance" in found and not found.get("draft_tokens"):
        raise InputError(option, "acceptance needs the number of proposed tokens", "add draft=3")
    if "wait_share" in found and "wait_steps" not in found:
        raise InputError(option, "fill needs the steps that prompts wait", "add wait=20")
    return Serving(fields=found)


def _part(option: str, part: str, key: str, value: str) -> tuple[str, Any]:
    """The field of a part, and its value."""
    if key in _NUMBERS:
        number = length(value) if key in ("chunk", "captured") else natural(value)
        most = {"draft": _MOST_DRAFTS, "requests": _MOST_REQUESTS}.get(key, _MOST)
        if not number or number > most:
            raise InputError(option, f"{part!r} is not a number from 1 to {most:,}", f"write such as {EXAMPLE}")
        return _NUMBERS[key], number
    if key in _SHARES:
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        inside = 0 < share <= 1 if key == "memory" else 0 <= share < 1 if key in ("prefix", "spread") else 0 <= share <= 1
        if not inside:
            raise InputError(option, f"{part!r} is not a share", "write a number between 0 and 1, such as 0.5")
        return _SHARES[key], share
    names = ", ".join((*_NUMBERS, *_SHARES))
    raise InputError(option, f"{part!r} is not one of {names}", f"write such as {EXAMPLE}")


def target(option: str, text: str | None) -> ServingTarget:
    """The value of `--info-serving-search`. Raises InputError unless both times are given once, in ms or s."""
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        key, _, value = (each.strip() for each in part.partition("="))
        seconds = _seconds(value)
        if key not in ServingTarget._fields or key in found or not seconds:
            raise InputError(option, f"{part!r} is not a time to the first token or of an output token", f"write {SEARCH_EXAMPLE}")
        found[key] = seconds
    missing = [name for name in ServingTarget._fields if name not in found]
    if missing:
        raise InputError(option, f"it does not give {missing[0]}", f"write {SEARCH_EXAMPLE}")
    return ServingTarget(**found)


def _seconds(text: str) -> float | None:
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * scale
            except ValueError:
                return None
            return value if 1e-6 <= value <= 1e6 else None
    return None
