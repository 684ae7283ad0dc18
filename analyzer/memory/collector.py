"""Python's garbage collector during an evaluation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, and restores its state afterwards.

    An evaluation creates thousands of records, most of them for caches. Collections in between would take a third of its time.
    Operations that a module caches refer back to it: who evaluates many jobs calls `Module.forget`, or collects now and then.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
