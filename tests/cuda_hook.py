"""Calls of the CUDA recorder as PyTorch makes them, and allocated bytes computed from the events of a trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from allocator_hook.cuda.library import CudaRecorder
from analyzer.trace.reader import Allocation, Event, Free, Header, Trace

REPOSITORY: Final = Path(__file__).resolve().parent.parent
HAS_COMPILERS: Final = bool(shutil.which("g++") and shutil.which("gcc"))
HEADER: Final = Header(recorder="cuda", argv=("torchrun", "pretrain_gpt.py"), gpu="none")


def malloc(recorder: CudaRecorder, size: int, device: int = 0, stream: int = 0) -> int | None:
    pointer: int | None = recorder.library.hook_malloc(size, device, stream)
    return pointer


def free(recorder: CudaRecorder, pointer: int | None, device: int = 0, stream: int = 0) -> None:
    recorder.library.hook_free(pointer, 0, device, stream)


def replay(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """Return peak and current bytes of each device, computed from the events. Fails if a live address is allocated again."""
    live: dict[int, Allocation] = {}
    current: dict[int, int] = {}
    peak: dict[int, int] = {}
    for event in trace:
        if isinstance(event, Allocation) and not event.failed:
            assert event.pointer not in live, f"{event} while {live[event.pointer]} is live"
            live[event.pointer] = event
            current[event.device] = current.get(event.device, 0) + event.bytes
            peak[event.device] = max(peak.get(event.device, 0), current[event.device])
        elif isinstance(event, Free) and event.pointer in live:
            freed = live.pop(event.pointer)
            assert (freed.device, freed.stream) == (event.device, event.stream)
            current[event.device] -= freed.bytes
    return peak, current


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]
