"""Checks of files and folders.

Devices and pipes are refused where a file is expected: they may have no end, or no writer. Compiled libraries and cached traces are
used only from folders that only this user can write to.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from analyzer.errors import InputError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_special_file(path: str | Path, option: str, remedy: str) -> None:
    """Raises InputError for a device, a pipe or a socket at `path`. A path that cannot be examined is left to its reader."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(option, f"'{path}' is a device or a pipe instead of a file", remedy)


def read_json_object(path: Path, option: str, remedy: str) -> dict[str, Any]:
    """The JSON object in the file that an option names. Raises InputError if it cannot be read or is something else."""
    refuse_special_file(path, option, remedy)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(option, f"cannot read '{path}' ({error.strerror})", remedy) from None
    except (ValueError, RecursionError):
        raise InputError(option, f"'{path}' is not JSON", remedy) from None
    if not isinstance(content, dict):
        raise InputError(option, f"'{path}' is not a JSON object", remedy)
    return content


def refuse_unknown_fields(found: Iterable[str], known: Collection[str], path: Path, option: str) -> None:
    """Raises InputError that names the first of the fields `found` in a file that is not in `known`, and all of `known`."""
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        raise InputError(option, f"'{path}' has the unknown field {unknown!r}", f"known are {', '.join(known)}")


def is_private(path: Path) -> bool:
    """Whether the file or folder exists, belongs to this user, and nobody else can write to it. A link does not count."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(found.st_mode)


def private_folder(folder: Path) -> Path:
    """Return the absolute path of `folder`, which is created for this user only if it is missing, with its parents.

    Raises PermissionError if another user can write to it or can replace it or a folder above it; OSError if it cannot be created.
    """
    folder = folder.absolute()
    missing = []
    for each in (folder, *folder.parents):
        if os.path.lexists(each):
            break
        missing.append(each)
    for each in reversed(missing):
        with suppress(FileExistsError):  # another run may create it at the same time
            each.mkdir(mode=0o700)
    if folder.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    shared = None if is_private(folder) else folder
    shared = shared or next((each for each in folder.resolve().parents if _can_be_replaced(each)), None)
    if shared is not None:
        raise PermissionError(errno.EPERM, f"other users can write to {shared}", str(folder))
    return folder


def publish(unfinished: Path, path: Path, *, mode: int | None = None) -> None:
    """Rename a finished file to `path` after its contents are on the disk, so that a crash leaves no incomplete file there.

    `mode` replaces the permissions of the file. Raises OSError.
    """
    if mode is not None:
        unfinished.chmod(mode)
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _can_be_replaced(folder: Path) -> bool:
    """Whether a user other than this one and the administrator can rename the entries of `folder`."""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0, Path("/").stat().st_uid):
        return True
    return bool(found.st_mode & _WRITABLE_BY_OTHERS) and not found.st_mode & stat.S_ISVTX
