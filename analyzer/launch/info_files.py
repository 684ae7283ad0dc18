"""Whether the files that the options of this program write are different ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.launch.info_options import InfoOptions

WRITTEN: Final = ("json", "html", "timeline", "record", "search_csv", "calibrate")
"""Fields of `InfoOptions` that name a file to write."""
READ: Final = ("hardware", "calibration", "check")
"""Fields that name a file to read."""
NOT_PRINTED: Final = ("html", "timeline")
"""Of the written files those that cannot be standard output, so that '-' would be a file of this name."""


def check_files(options: InfoOptions) -> None:
    """Raises InputError if two options write one file, or one writes a file that another reads.

    `--info-json` may write the report of `--info-against`, which is read before. Devices such as /dev/null may be named repeatedly.
    """
    used: dict[str, str] = {}
    for field in READ:
        if (path := getattr(options, field)) is not None:
            used.setdefault(os.path.realpath(path), _flag(field))
    for path in options.against:
        used.setdefault(os.path.realpath(path), "--info-against")
    for field in WRITTEN:
        path = getattr(options, field)
        if path == "-" and field in NOT_PRINTED:
            raise InputError(_flag(field), "cannot be standard output", "name a file")
        if path is None or path == "-" or (os.path.exists(path) and not os.path.isfile(path)):
            continue
        place = os.path.realpath(path)
        other = used.setdefault(place, _flag(field))
        if other != _flag(field) and (field, other) != ("json", "--info-against"):
            raise InputError(_flag(field), f"'{path}' is also the file of {other}", "name another file")
        used[place] = _flag(field)


def _flag(field: str) -> str:
    return f"--info-{field}".replace("_", "-")
