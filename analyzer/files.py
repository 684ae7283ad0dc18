"""Checks of files and folders, and files that are written in one step.

Devices and pipes are refused where a file is expected: they may have no end, or no writer. Compiled libraries and cached traces are
used only from folders that only this user can write to.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from analyzer.errors import InputError

NOT_WRITABLE: Final = "name a file in a folder that exists and that you may write to"
"""The remedy for a file that cannot be written."""
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
    with suppress(OSError):  # the file is there, and some file systems cannot do this with a folder
        _sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path for a new file, which is renamed to `path` after the block. If the block fails, an older file stays as it is.

    A symbolic link at `path` is replaced, and the file that it points to does not change. The new file has the permissions of the
    older one; without one they follow the umask. A device or a pipe is written directly. Raises OSError.
    """
    if is_written_directly(path):
        yield path
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    target = path.parent.resolve() / path.name
    folder = target.parent / f".get-training-info-{os.urandom(8).hex()}"
    unfinished = folder / target.name
    try:
        folder.mkdir(mode=0o700)  # nobody else can put a link into it
        yield unfinished
        publish(unfinished, target, mode=_permissions(target))
    finally:
        with suppress(OSError):
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()


def opened(path: Path) -> TextIO:
    """A file to write text to, open. An open file of this process, such as /dev/stdout, is continued where it stands."""
    number = _descriptor(str(path))
    if number is None:
        return open(path, "w", encoding="utf-8")
    if sys.stdout is not None:
        sys.stdout.flush()
    return open(os.dup(number), "w", encoding="utf-8")


def _descriptor(path: str) -> int | None:
    """The descriptor of this process that a path stands for."""
    folder, _, name = path.rpartition("/")
    if folder == "/dev":
        return {"stdout": 1, "stderr": 2}.get(name)
    return int(name) if folder in ("/dev/fd", "/proc/self/fd") and re.fullmatch("[0-9]{1,6}", name) else None


def check_writable(path: str, option: str) -> None:
    """Raises InputError if no file can be created at `path`, before time is spent on its content. Leaves no file."""
    file = Path(path)
    if is_written_directly(file):
        return
    fault = None
    if file.is_dir():
        fault = os.strerror(errno.EISDIR)
    elif not file.parent.is_dir():
        fault = os.strerror(errno.ENOTDIR if file.parent.exists() else errno.ENOENT)
    elif not os.access(file.parent, os.W_OK | os.X_OK):
        fault = os.strerror(errno.EACCES)
    if fault is not None:
        raise InputError(option, f"cannot write '{path}' ({fault})", NOT_WRITABLE)


def is_written_directly(path: Path) -> bool:
    """Whether a file at `path` cannot be replaced: a device, a pipe, or an open file of a process, such as /dev/stdout."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    folder = os.path.join(os.path.realpath(path.parent), "")
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or folder == "/dev/" or folder.startswith("/proc/")


def _permissions(path: Path) -> int | None:
    """The permissions of a file; None if there is none, or a link."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    return mode & 0o777 if stat.S_ISREG(mode) else None


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
