"""The number of processes of a launch, from its launcher's options or from environment variables of a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from analyzer.errors import InputError
from analyzer.launch.launchers.launcher_options import ACCELERATE, DEEPSPEED, TORCHRUN
from analyzer.launch.launchers.world import OVERRIDE, PER_NODE, Given, World, count
from analyzer.units import MAX_DIGITS


def read_world(
    options: Iterable[tuple[str, str | None, str]],
    environ: Mapping[str, str],
    *,
    launcher: str | None = None,
    folder: Path | None = None,
    size: int | None = None,
    gpus_per_node: int | None = None,
) -> World | None:
    """The world of a launch, or None if nothing gives it.

    `options`: the launcher's (dest, value, flag as written). `launcher`: its name, None if the command line does not have it.
    `folder`: for relative paths of host files. `size` and `gpus_per_node`: the values of --info-world-size and
    --info-gpus-per-node. `size` wins over everything else; then come the launcher's options, and then the environment.
    Raises InputError for sizes that are not positive integers or that contradict each other.
    """
    given = {dest: (value or "", written) for dest, value, written in options}
    if size is not None:
        return _overridden(size, gpus_per_node, given)
    if launcher == DEEPSPEED or {"num_nodes", "num_gpus", "hostfile", "include"} & given.keys():
        from analyzer.launch.launchers.deepspeed import deepspeed_world

        world = deepspeed_world(given, environ, folder, gpus_per_node)
    elif launcher == ACCELERATE or {"num_processes", "num_machines", "config_file"} & given.keys():
        from analyzer.launch.launchers.accelerate import accelerate_world

        world = accelerate_world(given, environ, folder)
    else:
        world = _torchrun_world(given, environ, gpus_per_node, started_by_torchrun=launcher == TORCHRUN)
    return _with_nodes_of(world, gpus_per_node)


def _overridden(size: int, gpus_per_node: int | None, given: Given) -> World:
    """The world of --info-world-size. The number per node is that of the option, or else of the launcher if it divides the size."""
    if gpus_per_node is not None:
        if size % gpus_per_node:
            fault = f"{size} GPUs cannot be split into nodes of {gpus_per_node} ({PER_NODE})"
            raise InputError(OVERRIDE, fault, f"give a multiple of {gpus_per_node}")
        return World(size // gpus_per_node, gpus_per_node)
    for dest in ("nproc_per_node", "num_gpus"):
        value = given.get(dest, ("", ""))[0]
        if value.isdecimal() and len(value) <= MAX_DIGITS and int(value) and size % int(value) == 0:
            return World(size // int(value), int(value))
    world = World.of(size)
    return World(world.nodes, world.gpus_per_node, (f"{OVERRIDE} {size}: nodes of {world.gpus_per_node} GPUs are assumed.",))


def _with_nodes_of(world: World | None, gpus_per_node: int | None) -> World | None:
    """The same number of ranks in nodes of --info-gpus-per-node."""
    if world is None or gpus_per_node is None or world.gpus_per_node == gpus_per_node:
        return world
    if world.size % gpus_per_node:
        fault = f"{world.size} GPUs cannot be split into nodes of {gpus_per_node}"
        raise InputError(PER_NODE, fault, f"give a divisor of {world.size}, or the number of GPUs with {OVERRIDE}")
    return World(world.size // gpus_per_node, gpus_per_node, world.assumptions)


def _torchrun_world(
    options: Given, environ: Mapping[str, str], gpus_per_node: int | None, *, started_by_torchrun: bool
) -> World | None:
    """The world of torchrun's options and of its variables PET_*; without these, of the environment."""
    given = dict(options)
    assumptions: list[str] = []
    for dest in ("nnodes", "nproc_per_node"):
        variable = f"PET_{dest.upper()}"
        if dest not in given and environ.get(variable):
            given[dest] = (environ[variable], variable)
            flag = "--" + dest.replace("_", "-")
            assumptions.append(f"{variable}={environ[variable]} in the environment is used as torchrun's {flag}.")
    sized = given.keys() - {"module", "no_python"}
    if not sized and not started_by_torchrun:
        from analyzer.launch.launchers.environment import world_of_environment

        return world_of_environment(environ, gpus_per_node)
    nodes, per_node = 1, 1
    elastic = None
    if "nnodes" in given:
        least, nodes = _nodes(*given["nnodes"])
        elastic = (f"{given['nnodes'][1]} {given['nnodes'][0]}", least) if least < nodes else None
    elif "standalone" not in given:
        assumptions.append("--nnodes is not given: torchrun starts 1 node.")
    if "nproc_per_node" in given:
        per_node = _gpus_per_node(*given["nproc_per_node"], environ, assumptions)
    else:
        assumptions.append("--nproc-per-node is not given: torchrun starts 1 process per node.")
    return World(nodes, per_node, tuple(assumptions), elastic)


def _nodes(value: str, option: str) -> tuple[int, int]:
    """The smallest and the largest number of 'MIN:MAX', or N and N of 'N'."""
    least, colon, most = value.partition(":")
    if not colon:
        number = count(value, option, "nodes")
        return number, number
    lower, upper = count(least, option, "nodes"), count(most, option, "nodes")
    if lower > upper:
        raise InputError(option, f"the minimum in {value} is above the maximum", f"write {upper}:{lower}")
    return lower, upper


def _gpus_per_node(value: str, option: str, environ: Mapping[str, str], assumptions: list[str]) -> int:
    """The number in `value`; for `gpu` and `auto` the number of GPUs that Slurm gives to the job on a node."""
    of_job = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if value in ("gpu", "auto") and of_job:
        assumptions.append(f"{option} {value}: {of_job} GPUs are assumed, from SLURM_GPUS_PER_NODE.")
        return count(of_job, "SLURM_GPUS_PER_NODE", "processes")
    if value in ("gpu", "auto", "cpu", "xpu", "privateuse"):
        fault = f"{value!r} depends on the machine on which the launcher runs"
        raise InputError(option, fault, f"write a number, such as {option} 8, or give the total number of GPUs with {OVERRIDE} N")
    return count(value, option, "processes")
