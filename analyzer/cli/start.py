"""`--info-launch`: the process becomes the real training."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from analyzer.errors import InputError
from analyzer.launch.training_command import training_command

OPTION = "--info-launch"


def start_training(argv: Sequence[str], *, folder: Path, has_verdict: bool) -> NoReturn:
    """Replaces this process. Raises InputError if the GPU memory is not known, or if the training cannot be started."""
    if not has_verdict:
        raise InputError(
            OPTION, "the GPU memory is not known, so there is no verdict", "name the GPU with --info-gpu or --info-gpu-memory"
        )
    command = training_command(argv, folder=folder)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(OPTION, f"{command[0]} cannot be started ({error.strerror})", "install PyTorch here") from None
