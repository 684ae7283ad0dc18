"""Compiles the recorder with plain g++: `python -m allocator_hook.cuda.build` prints the path of the library as its last line.

The library is kept in the user's cache folder under a hash of its sources and of the compiler's command, so that it is compiled
once. Neither CUDA nor its headers are needed.
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

SOURCE: Final = Path(__file__).resolve().parent / "recorder.cpp"
FLAGS: Final = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread")
LIBRARIES: Final = ("-ldl",)


def build() -> Path:
    """The path of the compiled recorder; compiles it where that was not done yet.

    The compiler is g++, or what the environment variable CXX names. Raises InputError where there is none or where it fails.
    """
    compiler = _compiler()
    library = cache_folder() / f"recorder-{_hash(compiler)}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(fresh), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise InputError("--info-record", f"the recorder does not compile ({complaint})", f"try: {shlex.join(command)}")
        fresh.replace(library)  # at once, since all ranks of a node may build at the same time
    return library


def cache_folder() -> Path:
    """Where the library is kept: get-training-info in $XDG_CACHE_HOME, else in ~/.cache. Raises InputError."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "get-training-info"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = f"the recorder cannot be kept in {folder} ({error.strerror})"
        raise InputError("--info-record", fault, "set XDG_CACHE_HOME to a folder that can be written") from error
    return folder


def _compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise InputError("--info-record", f"there is no compiler {compiler[0]}", "install g++, or name a compiler in CXX")
    return compiler


def _hash(compiler: list[str]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, LIBRARIES, platform.machine())).encode())
    for source in sorted((SOURCE, *SOURCE.parent.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Builds, and prints the library's path."""
    try:
        print(build())
    except AnalyzerError as error:
        print(f"build: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
