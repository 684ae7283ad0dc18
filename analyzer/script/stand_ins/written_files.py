"""Keeps the files that a script has written and that a launch names, such as a configuration in a heredoc.

The script writes to a private copy of the file system, which is gone when the launch is analyzed.
"""

from __future__ import annotations

import os
import stat
import tempfile

from analyzer.script.stand_ins import context

LARGEST = 8 << 20
"""Bytes of a file that is kept. Weights are larger, and are not read."""
MOST_FILES = 200
"""Files of one launch."""


def keep(argv: list[str]) -> tuple[str, str]:
    """Copies the files of this run that words of `argv` name. Returns the folder of the copies, and a digest; empty without any.

    Of a folder, the files directly in it are kept.
    """
    if context.run_all():
        return "", ""
    since = os.stat(os.path.join(context.folder(), "stand_in")).st_ctime
    names = [name for word in argv for name in _files(word.partition("=")[2] if word.startswith("-") else word)]
    found = [name for name in dict.fromkeys(names) if _is_new(name, since)][:MOST_FILES]
    if not found:
        return "", ""
    import hashlib

    digest = hashlib.sha256()
    target = tempfile.mkdtemp(prefix="written", dir=context.folder())
    for name in found:
        copy = target + os.path.abspath(name)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        with open(name, "rb") as source, open(copy, "wb") as file:
            content = source.read()
            file.write(content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return target, digest.hexdigest()


def _files(name: str) -> list[str]:
    """The file of this name, or the files in the folder of this name."""
    if not name or "\0" in name:
        return []
    try:
        return [os.path.join(name, each) for each in os.listdir(name)] if os.path.isdir(name) else [name]
    except OSError:
        return []


def _is_new(name: str, since: float) -> bool:
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST and found.st_ctime >= since and os.access(name, os.R_OK)
