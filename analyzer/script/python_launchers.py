"""Python files that start a launcher in another process, and are run as a launch script is."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from analyzer.script.stand_ins.python_command import trains

STARTS: Final = re.compile(rb"\bsubprocess\b|\bos\.(?:system|exec[lv]p?e?|posix_spawnp?|popen)\b|\bpexpect\b|\bsh\.")
LAUNCHERS: Final = re.compile(rb"\b(?:torchrun|torch\.distributed\.(?:run|launch)|deepspeed|srun|sbatch|mpirun|accelerate)\b")
LARGEST: Final = 1 << 20
"""Bytes of the file that are read."""


def starts_a_launcher(path: str, argv: Sequence[str]) -> bool:
    """Whether the file at `path` names a launcher and a function that starts programs, and `argv` is not the launch itself."""
    if not os.path.isfile(path) or trains(os.path.basename(path), list(argv)):
        return False
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST)
    except OSError:
        return False
    return STARTS.search(text) is not None and LAUNCHERS.search(text) is not None
