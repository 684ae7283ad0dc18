"""Commands that start a recipe of Megatron-Bridge: how the framework writes the configuration that they build, without GPUs.

Sources: scripts/training/{run_recipe,setup_experiment,recipe_runner}.py and scripts/performance/{bootstrap,run_script}.py of
Megatron-Bridge, August 2026. A dry run builds the container with all options and overrides, writes it, and ends.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.launchers.world import USUAL_GPUS_PER_NODE
from analyzer.units import natural

_FILE: Final = "config.yaml"
_PERFORMANCE: Final = "performance"
"""Folder of the scripts for benchmarks."""
_FORWARDING: Final = ("run_recipe.py", "setup_experiment.py")
"""Scripts whose options `run_recipe.py` reads, besides those of Slurm."""
_OF_SLURM: Final = {
    "--nodes": 1, "--gpus-per-node": 1, "--account": 1, "--partition": 1, "--time": 1, "--gres": 1, "--additional-slurm-params": 1,
    "--no-gpu-resource-request": 0, "--container-image": 1, "--mount": 1, "--env": 1, "--srun-arg": 1, "-lmc": 1,
    "--peak-mem-clk": 1, "--experiment-name": 1, "--submission-dry-run": 0, "--dry-run": 0, "--wait": 0,
}  # fmt: skip
"""Options of `setup_experiment.py` that are not those of a recipe, each with its number of values."""
_NODES: Final = ("--nodes", "--nnodes")
_GPUS_PER_NODE: Final = ("--gpus-per-node", "--nproc-per-node", "-gn")
_GPUS: Final = ("--num-gpus", "-ng")
_IN_NAME: Final = re.compile(r"_(\d+)gpu_")


def refusal(program: str, words: Sequence[str], launcher: Sequence[str], *, folder: Path) -> InputError:
    """The error for a command that starts a recipe. Its remedy is the command that writes the configuration, and the next one."""
    fault = "builds the configuration of Megatron-Bridge in Python, which is not read"
    gpus = _gpus([*launcher, *words])
    file = str(folder / _FILE)
    analysis = f"get-training-info {shlex.quote(file)} --info-world-size {gpus or 'GPUS'}"
    dump = _dump(program, words, file)
    if dump is None:
        return InputError(
            program, fault, f"call config.to_yaml('{_FILE}') in it, or set logger.save_config_filepath, and run {analysis}"
        )
    return InputError(program, fault, f"let Megatron-Bridge write it, without GPUs: {dump} && {analysis}")


def _dump(program: str, words: Sequence[str], file: str) -> str | None:
    """The command that writes the configuration to `file`; None for a script without a dry run."""
    path = PurePath(program)
    if path.parent.name == _PERFORMANCE:
        return shlex.join(["python", str(path.with_name("bootstrap.py")), *words, "--dryrun", "--save_config_filepath", file])
    if path.name not in _FORWARDING:
        return None
    script = str(path.with_name("run_recipe.py"))
    return shlex.join(["python", script, *_of_recipe(words), "--dry-run", f"logger.save_config_filepath={file}"])


def _of_recipe(words: Sequence[str]) -> Iterator[str]:
    """The words without options of Slurm."""
    skipped = 0
    for word in words:
        flag, equals, _ = word.partition("=")
        count = _OF_SLURM.get(_plain(flag)) if word.startswith("-") else None
        if count is not None:
            skipped = 0 if equals else count
        elif skipped:
            skipped -= 1
        else:
            yield word


def _gpus(words: Sequence[str]) -> int | None:
    """The number of GPUs that the options or the name of the recipe give."""
    values: dict[str, str] = {}
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            values[_plain(flag)] = value if equals else next(iter(words[position + 1 : position + 2]), "")

    def given(flags: Sequence[str]) -> int | None:
        return next((number for flag in flags if (number := natural(values.get(flag, "")))), None)

    nodes, each = given(_NODES), given(_GPUS_PER_NODE)
    if given(_GPUS) or (nodes is None and each is None):
        named = _IN_NAME.search(values.get("--recipe", ""))
        return given(_GPUS) or (int(named[1]) if named else None)
    return (nodes or 1) * (each or USUAL_GPUS_PER_NODE)


def _plain(flag: str) -> str:
    return flag.replace("_", "-")
