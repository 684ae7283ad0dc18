"""The command that starts the training: the same command line without the --info options, with the same launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.info_options import MODEL, SET, UNSET
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv

DEFAULT_SCRIPT: Final = "pretrain_gpt.py"
COMMANDS: Final = {None: ["torchrun"], "torchrun": ["torchrun"], "deepspeed": ["deepspeed"], "accelerate": ["accelerate", "launch"]}


def training_command(argv: Sequence[str], *, folder: Path) -> list[str]:
    """The launcher with its options, the training script and Megatron's options.

    The launcher is torchrun unless the words name another one. Without a launcher and its options the processes are assumed to be
    started by another program such as srun, and Python runs the script.
    The script is the one in `argv`, or else pretrain_gpt.py in `folder`. Raises InputError if it does not exist.
    """
    words = split_argv(argv, load_catalogue().newest)
    if any(name == MODEL for name, _ in words.info):
        raise InputError(
            "--info-launch",
            f"the training script does not have {MODEL}",
            "write the options that --info-print-options prints in the launch",
        )
    changed = next((name for name, _ in words.info if name in (SET, UNSET)), None)
    if changed is not None:
        raise InputError(changed, "only the analysis uses it, and --info-launch starts the launch as it is", "change the launch")
    module = any(dest == "module" for dest, _, _ in words.launcher_options)
    script = words.entry or DEFAULT_SCRIPT
    if not module and not (folder / script).exists():
        raise InputError(
            "--info-launch", f"there is no {script} in {folder}", "start it in the folder of the training script, or give its path"
        )
    if not words.launcher_options and words.launcher is None:
        return [sys.executable, "-u", script, *words.megatron]
    options = [word for _, value, flag in words.launcher_options for word in ((flag,) if value is None else (flag, value))]
    return [*COMMANDS[words.launcher], *options, script, *words.megatron]
