"""`--info-launch`: replaces the process by the training."""

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
    """Replaces this process by the training. Raises InputError if there is no verdict or the training cannot be started."""
    if not has_verdict:
        raise InputError(OPTION, "the GPU memory is not known, so there is no verdict", "give --info-gpu or --info-gpu-memory")
    command = training_command(argv, folder=folder)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(
            OPTION, f"{command[0]} cannot be started ({error.strerror})", "install PyTorch in this environment"
        ) from None
