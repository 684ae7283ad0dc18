"""Refuses devices and pipes where a file is expected: they may have no end, or no writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from analyzer.errors import InputError


def refuse_special_file(path: str | Path, option: str, remedy: str) -> None:
    """Raises InputError for a device, a pipe or a socket at `path`. A path that cannot be examined is left to its reader."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(option, f"'{path}' is a device or a pipe instead of a file", remedy)
