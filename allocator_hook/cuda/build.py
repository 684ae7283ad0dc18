"""Compile the CUDA recorder with g++: `python -m allocator_hook.cuda.build` prints the path of the library as its last line.

The library is cached under a hash of its sources and of the compiler command, so it is compiled only once. The build needs
neither CUDA nor its headers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from analyzer.errors import AnalyzerError, InputError
from analyzer.files import is_private, private_folder, publish

SOURCE: Final = Path(__file__).resolve().parent / "recorder.cpp"
FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
LIBRARIES: Final = ("-ldl",)


def build() -> Path:
    """Return the path of the compiled recorder. Compile it if it is not in the cache.

    The compiler is g++, or the value of the environment variable CXX. Raises InputError if it is missing or fails.
    """
    compiler = _compiler()
    library = cache_folder() / f"recorder-{_hash(compiler)}.so"
    if is_private(library):  # a library that somebody else put there must not be loaded
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(fresh), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and not fresh.is_file():
            raise InputError("--info-record", f"the compiler {compiler[0]} wrote no library", "set CXX to a C++ compiler")
        if done.returncode != 0:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            fault = f"the recorder does not compile ({complaint})"
            raise InputError("--info-record", fault, f"run this command for the full error: {shlex.join(command)}")
        publish(fresh, library, mode=0o700)  # atomic, because all ranks of a node may build at the same time
    return library


def cache_folder() -> Path:
    """Return the folder of the library: get-training-info in $XDG_CACHE_HOME or ~/.cache. It is created if it is missing.

    Raises InputError if the folder cannot be created, or if another user can write to it or to a folder above it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "get-training-info"
    try:
        return private_folder(folder)
    except OSError as error:
        fault = f"cannot use the folder {folder} for the compiled recorder ({error.strerror})"
        raise InputError("--info-record", fault, "set XDG_CACHE_HOME to a folder that only you can write to") from error


def _compiler() -> list[str]:
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise InputError("--info-record", f"CXX is not a command ({error})", "set CXX to a C++ compiler") from None
    if shutil.which(compiler[0]) is None:
        raise InputError("--info-record", f"there is no compiler {compiler[0]}", "install g++, or set CXX to a C++ compiler")
    return compiler


def _hash(compiler: list[str]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, LIBRARIES, platform.machine())).encode())
    for source in sorted((SOURCE, *SOURCE.parent.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Build the library and print its path. Returns the exit code."""
    try:
        print(build())
    except AnalyzerError as error:
        print(f"build: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
