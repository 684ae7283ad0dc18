"""The processes that `accelerate launch` starts (accelerate/commands/launch.py, Accelerate 1.10)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analyzer.errors import InputError
from analyzer.launch.launchers.environment import world_of_allocation
from analyzer.launch.launchers.world import OVERRIDE, Given, World, count
from analyzer.launch.written_files import as_written


def accelerate_world(given: Given, environ: Mapping[str, str], folder: Path | None) -> World | None:
    """The world of accelerate's options and its configuration file; None if they do not give the number of processes.

    `--num_processes` counts the processes of all machines.
    """
    configured = _configuration(given, folder)
    sizes: dict[str, tuple[int, str]] = {}
    for dest in ("num_processes", "num_machines"):
        value, written = given[dest] if dest in given else (configured.get(dest, ""), f"--config_file: {dest}")
        if dest in given or value:
            sizes[dest] = (count(value, written, "processes" if dest == "num_processes" else "machines"), written)
    if "num_processes" not in sizes:
        return world_of_allocation(environ, None)
    (size, written), (machines, _) = sizes["num_processes"], sizes.get("num_machines", (1, ""))
    if size % machines:
        fault = f"{size} processes cannot be split over {machines} machines"
        raise InputError(written, fault, f"give a multiple of {machines}, or the number of GPUs with {OVERRIDE} N")
    return World(machines, size // machines)


def _configuration(given: Given, folder: Path | None) -> dict[str, str]:
    """The scalar values at the top level of the YAML file of `--config_file`; empty if the file is not here."""
    name = given.get("config_file", ("", ""))[0]
    path = as_written((folder or Path()) / name)
    if not name or not path.is_file():
        return {}
    values = {}
    for line in path.read_text(errors="replace").splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        if colon and key == key.strip():
            values[key] = value.strip().strip("'\"")
    return values
