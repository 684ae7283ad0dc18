#!/usr/bin/env python3
"""Predicts the memory of each GPU of a Megatron-LM launch, whether it fits, and which ranks communicate.

Give it a launch script, or replace `torchrun` in the script by `python get_training_info.py`.
"""

from __future__ import annotations

import gc
import io
import os
import sys

from analyzer.cli.main import main

__all__ = ["main", "program"]


def program() -> int:
    """Runs `main` in a process that ends afterwards, and returns the exit status."""
    gc.disable()  # the process ends before a collection could save memory
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="backslashreplace")  # for reports in an ASCII locale
    status = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # the reader has closed the pipe; Python must not report this again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    gc.freeze()  # saves the collection when Python exits
    return status


if __name__ == "__main__":
    sys.exit(program())
