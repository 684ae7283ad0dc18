#!/usr/bin/env python3
"""Predicts the memory of each GPU of a Megatron-LM launch, whether it fits, and which ranks communicate.

Give it a launch script, or replace `torchrun` in the script by `python get_training_info.py`.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes longer than those above: Ctrl-C is handled after them
if TYPE_CHECKING:
    from collections.abc import Sequence
    from sys import UnraisableHookArgs
    from typing import NoReturn

__all__ = ["main", "program"]

REPEATED_AFTER = 0.01
"""Seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status (`analyzer.cli.main.main`)."""
    from analyzer.cli.main import main as run

    return run(argv)


def program() -> int:
    """Runs `main` in a process that ends afterwards, and returns the exit status.

    Ctrl-C ends the process with status 130 at any moment. While modules are imported and when output is flushed there is nothing to
    clean up.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if interruptible:
        signal.signal(signal.SIGINT, _end)
    gc.disable()  # the process ends before a collection could save memory
    from analyzer.cli.main import main as run
    from analyzer.errors import INTERRUPTED

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="backslashreplace")  # for reports in an ASCII locale
    sys.unraisablehook = _repeated
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
        if interruptible:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:  # the second one, or one before `run` or after it
        status = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # the reader has closed the pipe; Python must not report this again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    gc.freeze()  # saves the collection when Python exits
    return status


def _end(*_: object) -> NoReturn:
    """Handles Ctrl-C without a traceback."""
    os._exit(130)


def _repeated(error: UnraisableHookArgs) -> None:
    """Repeats Ctrl-C that came in a function whose errors Python prints and ignores, such as a callback of the import system."""
    if error.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, REPEATED_AFTER)  # not now: an error in this function is ignored as well
    else:
        sys.__unraisablehook__(error)


if __name__ == "__main__":
    sys.exit(program())
