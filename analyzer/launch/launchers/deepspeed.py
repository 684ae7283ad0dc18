"""The processes that the launcher of DeepSpeed starts (deepspeed/launcher/runner.py, DeepSpeed 0.17)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analyzer.errors import InputError
from analyzer.launch.launchers.environment import world_of_allocation
from analyzer.launch.launchers.world import OVERRIDE, Given, World, count
from analyzer.launch.written_files import as_written


def deepspeed_world(given: Given, environ: Mapping[str, str], folder: Path | None, gpus_per_node: int | None) -> World | None:
    """The world of deepspeed's options and its host file; None if they do not give the nodes and the GPUs of a node.

    Without `--num_gpus` deepspeed uses all GPUs of a node, and without a host file only its own node.
    """
    slots = _host_file(given, folder)
    if given.get("include", ("", ""))[0]:
        return _included(*given["include"], slots)
    nodes = _optional(given, "num_nodes")
    gpus = _optional(given, "num_gpus")
    if slots:
        nodes = min(nodes or len(slots), len(slots))
        chosen = list(slots.values())[:nodes]
        gpus = gpus or (chosen[0] if len(set(chosen)) == 1 else None)
        return World(nodes, gpus) if gpus else World(sum(chosen), 1)
    if gpus and nodes is None and "hostfile" not in given:
        return World(1, gpus)
    allocation = world_of_allocation(environ, gpus or gpus_per_node)
    gpus = gpus or gpus_per_node or (allocation.gpus_per_node if allocation else None)
    if nodes and gpus:
        return World(nodes, gpus)
    return allocation


def _optional(given: Given, dest: str) -> int | None:
    """The number of an option, None for -1, which is deepspeed's default: all."""
    if dest not in given or given[dest][0] == "-1":
        return None
    return count(given[dest][0], given[dest][1], "nodes" if dest == "num_nodes" else "GPUs")


def _host_file(given: Given, folder: Path | None) -> dict[str, int]:
    """Slots of each host of `--hostfile` (lines `worker-1 slots=8`); empty if the file is not here."""
    name, written = given.get("hostfile", ("", ""))
    path = as_written((folder or Path()) / name)
    if not name or not path.is_file():
        return {}
    slots: dict[str, int] = {}
    for line in path.read_text(errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        number = next((word.partition("=")[2] for word in words[1:] if word.startswith("slots=")), "")
        if not number.isdecimal():
            raise InputError(
                written, f"the line {line.strip()!r} of {name} has no number of slots", "write lines such as worker-1 slots=8"
            )
        slots[words[0]] = count(number, written, "slots")
    return slots


def _included(text: str, written: str, slots: Mapping[str, int]) -> World | None:
    """The world of `--include worker-1:0,1@worker-2`. A host without GPUs in the list has all those of the host file."""
    counts = []
    for host in text.split("@"):
        name, colon, listed = host.partition(":")
        if colon:
            counts.append(len([each for each in listed.split(",") if each]))
        elif name in slots:
            counts.append(slots[name])
        else:
            return None
    if not all(counts):
        raise InputError(
            written, f"{text!r} has a host without GPUs", f"write hosts such as worker-1:0,1,2,3, or give {OVERRIDE} N"
        )
    return World(len(counts), counts[0]) if len(set(counts)) == 1 else World(sum(counts), 1)
