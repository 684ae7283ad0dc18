"""What is known of serving engines: how they form steps, and what a step costs beside its kernels (`engines.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from analyzer.specs.serving import EngineName

_OTHER_KEYS: Final = ("sources", "also", "smaller_chunks")
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
    """Most tokens of a step with prompts, if no other number is given. Engines take fewer on GPUs with less memory."""
    chunked: bool
    """Prompts are split at that number. Otherwise a step has complete prompts."""
    step_seconds: float
    """Seconds of a step in which the GPU waits for the host."""
    request_seconds: float
    """The same for each request of the step."""
    first_seconds: float
    """Seconds of a request outside the steps, without reading its prompt."""
    text_seconds: float
    """Seconds to read a token of a prompt. One process reads those that arrive together, and the first step begins after the last
    one."""
    handover_seconds: float
    """Seconds of a request that one replica begins and another one continues."""
    also: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """(kernel, engine, architectures): on these, the faster of its own kernel and of that in the other engine's table is used."""
    captured_tokens: int = 0
    """Most tokens of a step with prompts that is replayed as CUDA graphs, if no other number is given."""
    operation_seconds: float
    """Least seconds of an operation in a step with prompts, which the host issues one by one."""


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def engine_of(name: EngineName, gpu: str = "", capacity_bytes: int | None = None) -> Engine:
    """An engine by its name, with its defaults on a GPU."""
    entry = _document()["engines"][name]
    values = {key: value for key, value in entry.items() if key not in _OTHER_KEYS}
    also = tuple((kernel, other, tuple(architectures)) for kernel, other, architectures in entry.get("also", ()))
    for rule in entry.get("smaller_chunks", ()):  # the first rule that applies
        if gpu.startswith(rule.get("gpu", "-")) or (capacity_bytes or 2**60) < rule.get("below_gib", 0) * 2**30:
            values["chunk_tokens"] = rule["tokens"]
            break
    return Engine(name=name, also=also, **values)
