"""Files that a launch script wrote in its private copy of the file system, where the launch would read them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

_COPIES: ContextVar[Path | None] = ContextVar("copies of files of a launch script", default=None)


@contextlib.contextmanager
def files_of_launch(copies: Path | None) -> Iterator[None]:
    """The analysis inside reads the files in the folder `copies`, each at its absolute path, in the place of those paths."""
    token = _COPIES.set(copies)
    try:
        yield
    finally:
        _COPIES.reset(token)


def copies() -> Path | None:
    """The folder of the analysis that runs, for `files_of_launch` in another thread or process."""
    return _COPIES.get()


def as_written(path: Path) -> Path:
    """The path at which the content of the file or folder `path` is to be read."""
    copies = _COPIES.get()
    if copies is None:
        return path
    copy = copies / os.path.abspath(path).lstrip("/")
    return copy if copy.is_file() or (copy.is_dir() and not path.exists()) else path
