"""What the stand-ins know of the run: its folder, what was said to the user, and the programs behind the stand-ins."""

from __future__ import annotations

import os
import sys

FOLDER_VARIABLE = "INFO_SCRIPT_FOLDER"
RUN_ALL_VARIABLE = "INFO_SCRIPT_RUN_ALL"
BASH_ENV_VARIABLE = "INFO_SCRIPT_BASH_ENV"
"""The BASH_ENV of the user."""
LINE_VARIABLE = "INFO_SCRIPT_LINE"
"""Line and file of the command that runs, separated by a space."""
REAL_VARIABLE = "INFO_SCRIPT_REAL"
"""The path by which a stand-in was called, if the script gave one."""
TRIED_VARIABLE = "INFO_SCRIPT_TRIED"
"""Process id, and the programs of one name that this process has been replaced by."""
BATCH_VARIABLE = "INFO_SCRIPT_BATCH"
"""The batch scripts that run, one inside the other, separated by colons."""
ELSEWHERE_VARIABLE = "INFO_SCRIPT_ELSEWHERE"
"""Set inside a container and on another machine, whose folders are not here."""
PRELOAD_VARIABLE = "INFO_SCRIPT_PRELOAD"
"""The library that replaces programs which are called by their path (preload/)."""
PROTECT_VARIABLE = "INFO_SCRIPT_PROTECT"
"""Set if that library also protects files, processes and the network of this machine."""
MAIN_VARIABLE = "INFO_SCRIPT_MAIN"
"""Process id of the shell of the script itself."""
OWN_VARIABLES = (
    MAIN_VARIABLE,
    PRELOAD_VARIABLE,
    PROTECT_VARIABLE,
    ELSEWHERE_VARIABLE,
    FOLDER_VARIABLE,
    RUN_ALL_VARIABLE,
    BASH_ENV_VARIABLE,
    LINE_VARIABLE,
    REAL_VARIABLE,
    TRIED_VARIABLE,
    BATCH_VARIABLE,
)
SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")


def folder() -> str:
    """The temporary folder of the run."""
    return os.environ[FOLDER_VARIABLE]


def stand_in_folder() -> str:
    """The folder of the stand-ins, which is the first of PATH."""
    return os.path.join(folder(), "bin")


def run_all() -> bool:
    """Whether the user wants commands that change something to run."""
    return bool(os.environ.get(RUN_ALL_VARIABLE))


def has_stand_in(name: str) -> bool:
    """Whether a program of this name, without a folder, is replaced."""
    return "/" not in name and name not in ("", ".", "..") and os.path.exists(os.path.join(stand_in_folder(), name))


def quoted(words: list[str]) -> str:
    """The words as a shell would read them."""
    return " ".join(word if word and SAFE.issuperset(word) else "'" + word.replace("'", "'\"'\"'") + "'" for word in words)


def say(text: str) -> None:
    """Prints one line for the user, with escapes such as \\x1b in the place of control characters."""
    line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    try:
        os.write(2, f"get-training-info: {line}\n".encode(errors="replace"))
    except OSError:
        return


def not_run(words: list[str]) -> int:
    """Says that a command is not run. The script sees a success."""
    say(f"not run: {quoted(words)}")
    return 0


def behind(name: str) -> str | None:
    """The program `name` on PATH behind the stand-ins; None without one. A name with a folder is its own path.

    A program may be a script that looks for the program of its own name, as pyenv's do. Programs that have replaced this very
    process before are therefore left out.
    """
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    tried = _tried()
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(place or ".", name)
        if place != stand_in_folder() and path not in tried and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def replace_by(path: str, words: list[str]) -> int:
    """Replaces this process by a program. `words` are its arguments, without its name. Returns only if that fails."""
    restore_path()
    tried = _tried()
    os.environ[TRIED_VARIABLE] = ":".join([str(os.getpid()), *tried, path])
    sys.stdout.flush()
    try:
        os.execv(path, [path, *words])
    except OSError as error:
        os.write(2, f"{path}: {os.strerror(error.errno or 0)}\n".encode(errors="replace"))
    return 126


def run_behind(name: str, words: list[str]) -> int:
    """Replaces this process by the program behind the stand-in `name`. Returns the status 127 if there is none."""
    path = behind(name)
    if path is None:
        os.write(2, f"{name}: command not found\n".encode(errors="replace"))
        return 127
    return replace_by(path, words)


def restore_path() -> None:
    """Makes sure that the next program finds the stand-ins first, and that the next bash reads the file of the run."""
    own = stand_in_folder()
    others = [place for place in os.environ.get("PATH", os.defpath).split(os.pathsep) if place != own]
    os.environ["PATH"] = os.pathsep.join([own, *others])
    bash_env = os.path.join(folder(), "bash_env")
    if os.environ.get("BASH_ENV") != bash_env:
        os.environ[BASH_ENV_VARIABLE] = os.environ.get("BASH_ENV", "")
        os.environ["BASH_ENV"] = bash_env


def _tried() -> list[str]:
    process, *paths = os.environ.get(TRIED_VARIABLE, "").split(":")
    return paths if process == str(os.getpid()) else []
