"""Ends the worker processes when the process that started them ends, in any way.

The kernel sends the signal (Linux, prctl(2), PR_SET_PDEATHSIG), so this also holds when the parent is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Final

from analyzer.signals import interrupt_blocking_calls

_PR_SET_PDEATHSIG: Final = 1


def remove_when_parent_ends(folder: Path, parent: int) -> None:
    """When the process `parent` ends: end the process group of this process, remove `folder`, and exit."""

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        try:
            while True:  # the others could still write to the folder
                os.wait()
        except ChildProcessError:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    interrupt_blocking_calls()
    _signal_when_parent_ends(parent, signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """End this process as soon as the process `parent` ends, or on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _signal_when_parent_ends(parent, signal.SIGKILL)


def _signal_when_parent_ends(parent: int, number: signal.Signals) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call
        os.kill(os.getpid(), number)
