"""What is known of serving engines: how they form steps, and what a step costs beside its kernels (`engines.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from analyzer.specs.serving import EngineName

FILE: Final = Path(__file__).with_name("engines.json")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine."""

    name: EngineName
    tables: str
    """The engine whose measured kernels are used."""
    mixed: bool
    """A step has prompts and generated tokens together. Otherwise prompts are computed in steps of their own, first."""
    chunk_tokens: int
    """Most tokens of a step with prompts."""
    chunked: bool
    """Prompts are split at that number. Otherwise a step has complete prompts."""
    step_seconds: float
    """Seconds of a step in which the GPU waits for the host."""
    request_seconds: float
    """The same for each request of the step."""
    first_seconds: float
    """Seconds of a request outside the steps: reading it, and sending its first token."""
    client_seconds: float
    """The same for each client, whose requests one process reads."""
    handover_seconds: float
    """Seconds of a request that one replica begins and another one continues."""
    layer_seconds: float
    """Least seconds of a layer in a step with prompts, whose kernels the host issues one by one."""


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def engine_of(name: EngineName) -> Engine:
    """An engine by its name."""
    entry = _document()["engines"][name]
    return Engine(name=name, **{key: value for key, value in entry.items() if key != "sources"})
