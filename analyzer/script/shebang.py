"""The first line of a script, which names its interpreter."""

from __future__ import annotations

import os


def interpreter(path: str) -> list[str]:
    """The first two words of the `#!` line of a file, without folders: a shell, or env and a shell. Empty without such a line."""
    try:
        with open(path, "rb") as file:
            first = file.readline(200)
    except OSError:
        return []
    words = first[2:].split() if first.startswith(b"#!") else []
    return [os.path.basename(word).decode(errors="replace") for word in words[:2]]
