"""The command that starts the real training: the same words without ours, under the launcher that they came from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv

DEFAULT_SCRIPT: Final = "pretrain_gpt.py"


def training_command(argv: Sequence[str], *, folder: Path) -> list[str]:
    """torchrun with its options, the training script and Megatron's options.

    Without any torchrun option the processes were started by somebody else, as under srun: then Python runs the script.
    The script is the one that stood in `argv`, else pretrain_gpt.py of the working folder; InputError if it is not there.
    """
    words = split_argv(argv, load_catalogue().newest)
    module = any(dest == "module" for dest, _, _ in words.torchrun)
    script = words.entry or DEFAULT_SCRIPT
    if not module and not (folder / script).exists():
        raise InputError("--info-launch", f"there is no {script} in {folder}", "start it from the folder of the training script")
    if not words.torchrun:
        return [sys.executable, "-u", script, *words.megatron]
    options = [word for _, value, flag in words.torchrun for word in ((flag,) if value is None else (flag, value))]
    return ["torchrun", *options, script, *words.megatron]
