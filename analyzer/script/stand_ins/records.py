"""Writes the launches that stand-ins intercept, one file each."""

from __future__ import annotations

import os
import time

from analyzer.script.stand_ins import context, written_files

IDENTICAL_LAUNCHES = 10
"""Number of identical launches after which the script is ended: it tries again until one succeeds."""
DIFFERENT_LAUNCHES = 100
PER_NODE = frozenset({
    "node_rank", "master_addr", "master_port", "rdzv_id", "rdzv_endpoint", "rdzv_conf", "rdzv_backend", "machine_rank",
    "main_process_ip", "main_process_port", "local_addr",
})  # fmt: skip
"""Options that differ between the nodes of one launch, or between its attempts."""


def record(argv: list[str], written: str, words: list[str]) -> int:
    """Writes a launch and returns the exit status 0.

    `argv` is the command line as the analysis reads it; `written` and `words` are the command as the script gave it.
    """
    import json

    environ = _environment_of_user()
    kept, digest = written_files.keep(argv)
    sizes = [environ.get(name) for name in ("WORLD_SIZE", "SLURM_NNODES", "SLURM_NTASKS")]
    same = json.dumps([identity(argv), os.getcwd(), digest, sizes])
    entry = {
        "argv": argv,
        "command": [written, *words],
        "environ": environ,
        "folder": os.getcwd(),
        "line": os.environ.get(context.LINE_VARIABLE, ""),
        "identity": same,
        "written": kept,
    }
    folder = os.path.join(context.folder(), "records")
    _write(folder, json.dumps(entry))
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    identities = []
    for name in names:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            identities.append(json.load(file)["identity"])
    if identities.count(same) >= IDENTICAL_LAUNCHES or len(set(identities)) >= DIFFERENT_LAUNCHES:
        stop("launches")
    return 0


def stop(reason: str) -> None:
    """Asks the run to end the script, and waits for that."""
    path = os.path.join(context.folder(), "stop")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(reason)
    os.replace(path + ".new", path)
    time.sleep(60)


def identity(argv: list[str]) -> list[str]:
    """The words without the options that differ between the nodes of one launch, and without their values."""
    kept: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
        if not word.startswith("--") or name not in PER_NODE:
            kept.append(word)
        elif not equals and position < len(argv) and not argv[position].startswith("-"):
            position += 1
    return kept


def _write(folder: str, text: str) -> None:
    """Writes a file whose name is the next number. Other stand-ins may write at the same time."""
    partial = os.path.join(folder, f"{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    number = len(os.listdir(folder))
    while True:
        try:
            os.link(partial, os.path.join(folder, f"{number:06d}.json"))
            break
        except FileExistsError:
            number += 1
    os.unlink(partial)


def _environment_of_user() -> dict[str, str]:
    """The environment of the launch, without what this program added to it."""
    environ = {name: value for name, value in os.environ.items() if name not in context.OWN_VARIABLES}
    places = environ.get("PATH", "").split(os.pathsep)
    environ["PATH"] = os.pathsep.join(place for place in places if place != context.stand_in_folder())
    own = os.environ.get(context.PRELOAD_VARIABLE)
    preloaded = [library for library in environ.pop("LD_PRELOAD", "").split(":") if library not in ("", own)]
    if preloaded:
        environ["LD_PRELOAD"] = ":".join(preloaded)
    environ.pop("BASH_ENV", None)
    if os.environ.get(context.BASH_ENV_VARIABLE):
        environ["BASH_ENV"] = os.environ[context.BASH_ENV_VARIABLE]
    return environ
