"""Compiles the library that is preloaded into every process of a launch script (`preload/`).

It replaces launchers that are called by their path, where neither PATH nor bash finds the stand-ins, and it protects the files,
processes and the network of the user. It needs Linux and a C compiler.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from analyzer.files import is_private, private_folder, publish

SOURCES: Final = Path(__file__).with_name("preload")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-delete-null-pointer-checks")
"""The functions of the library have the names of functions of the C library, whose headers say that no path is NULL."""
LIBRARIES: Final = ("-ldl", "-lpthread")
SECONDS: Final = 60


def write_library(path: Path, environ: Mapping[str, str]) -> bool:
    """Writes the library to `path`. False if it cannot be compiled here, or could not be loaded from there."""
    if platform.system() != "Linux" or any(letter in str(path) for letter in " :\n"):
        return False
    cached = _cache_folder(environ)
    if cached is None:
        return _compile(path, environ)
    library = cached / f"preload-{_hash()}.so"
    if not is_private(library) and not _compile(library, environ):
        return False
    shutil.copyfile(library, path)
    return True


def _cache_folder(environ: Mapping[str, str]) -> Path | None:
    """A folder that only this user can write to; None without one."""
    home = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else None)
    if home is None:
        return None
    try:
        return private_folder(Path(home) / "get-training-info" / "script")
    except OSError:
        return None


def _compile(path: Path, environ: Mapping[str, str]) -> bool:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name, path=environ.get("PATH"))) is not None), None)
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        try:
            done = subprocess.run(
                [compiler, *FLAGS, *map(str, _sources("*.c")), "-o", str(fresh), *LIBRARIES],
                capture_output=True, check=False, timeout=SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode != 0:
            return False
        publish(fresh, path, mode=0o700)  # in one step, because two runs may compile at the same time
    return True


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _hash() -> str:
    """Identifies the sources, the options of the compiler and the machine."""
    digest = hashlib.sha256(" ".join([*FLAGS, platform.machine()]).encode())
    for source in _sources("*.[ch]"):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]
