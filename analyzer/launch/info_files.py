"""Whether the files that the options of this program write are different ones, and no scripts or models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.launch.info_options import InfoOptions

WRITTEN: Final = ("json", "html", "timeline", "record", "search_csv", "calibrate")
"""Fields of `InfoOptions` that name a file to write."""
READ: Final = ("hardware", "check", "log")
"""Fields that name a file to read."""
READ_SEVERAL: Final = ("calibration", "against")
"""Fields that name several files to read."""
NOT_PRINTED: Final = ("html", "timeline")
"""Of the written files those that cannot be standard output, so that '-' would be a file of this name."""
SCRIPTS: Final = (
    ".py", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".pbs", ".qsub", ".lsf", ".zsh", ".ksh", ".csh", ".tcsh", ".fish",
)  # fmt: skip
"""Endings of names of scripts."""
OF_MODEL: Final = "config.json"
"""The file of a model in its folder."""


def check_files(options: InfoOptions) -> None:
    """Raises InputError if two options write one file, or one writes a file that another reads, or a script.

    `--info-json` may write the report of `--info-against`, which is read before. Devices such as /dev/null may be named repeatedly.
    """
    used: dict[str, str] = {}
    for field in READ:
        if (path := getattr(options, field)) is not None:
            used.setdefault(os.path.realpath(path), _flag(field))
    for field in READ_SEVERAL:
        for path in getattr(options, field):
            used.setdefault(os.path.realpath(path), _flag(field))
    for field in WRITTEN:
        path = getattr(options, field)
        if path == "-" and field in NOT_PRINTED:
            raise InputError(_flag(field), "cannot be standard output", "name a file")
        if path is None or path == "-" or (os.path.exists(path) and not os.path.isfile(path)):
            continue
        if os.path.isfile(path) and _is_script(path):
            raise InputError(_flag(field), f"'{path}' is a script, which would be overwritten", "name another file")
        place = os.path.realpath(path)
        other = used.setdefault(place, _flag(field))
        if other != _flag(field) and (field, other) != ("json", "--info-against"):
            raise InputError(_flag(field), f"'{path}' is also the file of {other}", "name another file")
        used[place] = _flag(field)


def check_model_file(options: InfoOptions, model: str, folder: Path) -> None:
    """Raises InputError if an option writes the config.json of a model. `model`: a name, or a path relative to `folder`."""
    files = {os.path.realpath(folder / model), os.path.realpath(folder / model / OF_MODEL)}
    for field in WRITTEN:
        path = getattr(options, field)
        if path is not None and path != "-" and os.path.realpath(path) in files:
            raise InputError(_flag(field), f"'{path}' is the file of the model, which would be overwritten", "name another file")


def _is_script(path: str) -> bool:
    """Whether a file is a script: by its name, that of the file behind a link, or its first characters."""
    if path.lower().endswith(SCRIPTS) or os.path.realpath(path).lower().endswith(SCRIPTS):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _flag(field: str) -> str:
    return f"--info-{field}".replace("_", "-")
