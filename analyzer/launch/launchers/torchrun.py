"""How many processes a launch starts, from torchrun's options or from the environment of a scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError

USUAL_GPUS_PER_NODE: Final = 8


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a launch: one for each GPU."""

    nodes: int
    gpus_per_node: int
    assumptions: tuple[str, ...] = ()
    """How the numbers were found where torchrun's options do not say them, one sentence each."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node


def read_world(options: Iterable[tuple[str, str | None, str]], environ: Mapping[str, str]) -> World:
    """The world of torchrun `options` (dest, value, flag as written), else of the environment. Raises InputError."""
    given = {dest: (value or "", written) for dest, value, written in options}
    assumptions: list[str] = []
    for dest in ("nnodes", "nproc_per_node"):
        variable = f"PET_{dest.upper()}"
        if dest not in given and environ.get(variable):
            given[dest] = (environ[variable], variable)
            flag = "--" + dest.replace("_", "-")
            assumptions.append(f"{variable}={environ[variable]} of the environment is taken for torchrun's {flag}.")
    if not given:
        return _world_of_environment(environ)
    nodes, gpus_per_node = 1, 1
    if "nnodes" in given:
        nodes = _nodes(*given["nnodes"], assumptions)
    elif "standalone" not in given:
        assumptions.append("--nnodes is not given: torchrun starts 1 node.")
    if "nproc_per_node" in given:
        gpus_per_node = _gpus_per_node(*given["nproc_per_node"])
    else:
        assumptions.append("--nproc-per-node is not given: torchrun starts 1 process on each node.")
    return World(nodes, gpus_per_node, tuple(assumptions))


def _nodes(value: str, option: str, assumptions: list[str]) -> int:
    """N of 'N', the larger of 'MIN:MAX'."""
    least, colon, most = value.partition(":")
    if not colon:
        return _count(value, option, "nodes")
    lower, upper = _count(least, option, "nodes"), _count(most, option, "nodes")
    if lower > upper:
        raise InputError(option, f"{value} begins above its end", f"write {upper}:{lower}")
    assumptions.append(f"{option} {value} is elastic: all {upper} nodes are assumed to join.")
    return upper


def _gpus_per_node(value: str, option: str) -> int:
    if value in ("gpu", "auto", "cpu", "xpu", "privateuse"):
        raise InputError(option, f"{value!r} depends on the machine that torchrun starts on", f"write a number, such as {option} 8")
    return _count(value, option, "processes")


def _count(value: str, option: str, what: str) -> int:
    """A positive whole number."""
    try:
        number = int(value)
    except ValueError:
        raise InputError(option, f"{value!r} is not a whole number", f"write a number of {what}, such as 8") from None
    if number < 1:
        raise InputError(option, f"{value} {what} cannot train", "write 1 or more")
    return number


def _world_of_environment(environ: Mapping[str, str]) -> World:
    """The world that a scheduler's variables describe; one process without any."""
    found = _world_size(environ)
    if found is None:
        return World(1, 1, ("No torchrun option and no scheduler's variable says how many GPUs there are: 1 is assumed.",))
    size, source = found
    local = _local_size(environ)
    if local is None:
        gpus_per_node = math.gcd(size, USUAL_GPUS_PER_NODE)
        how = f"nothing says how many GPUs a node has, {gpus_per_node} are assumed"
    else:
        gpus_per_node, variable = local
        gpus_per_node = min(gpus_per_node, size)
        if size % gpus_per_node:
            raise InputError(
                source, f"{size} processes do not fill nodes of {gpus_per_node} ({variable})", "give --nnodes and --nproc-per-node"
            )
        how = f"{gpus_per_node} on each node by {variable}"
    return World(size // gpus_per_node, gpus_per_node, (f"{size} GPUs by {source} of the environment; {how}.",))


def _world_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Processes in all, and the variables that say so."""
    if environ.get("WORLD_SIZE"):
        return _count(environ["WORLD_SIZE"], "WORLD_SIZE", "processes"), "WORLD_SIZE"
    if environ.get("SLURM_NTASKS"):
        return _count(environ["SLURM_NTASKS"], "SLURM_NTASKS", "processes"), "SLURM_NTASKS"
    if environ.get("SLURM_NNODES") and environ.get("SLURM_NTASKS_PER_NODE"):
        nodes = _count(environ["SLURM_NNODES"], "SLURM_NNODES", "nodes")
        tasks = _count(environ["SLURM_NTASKS_PER_NODE"], "SLURM_NTASKS_PER_NODE", "processes")
        return nodes * tasks, "SLURM_NNODES × SLURM_NTASKS_PER_NODE"
    if environ.get("OMPI_COMM_WORLD_SIZE"):
        return _count(environ["OMPI_COMM_WORLD_SIZE"], "OMPI_COMM_WORLD_SIZE", "processes"), "OMPI_COMM_WORLD_SIZE"
    return None


def _local_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Processes on each node, and the variable that says so. SLURM_GPUS_PER_NODE may name the GPU: h100:8."""
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_GPUS_PER_NODE"):
        if environ.get(variable):
            return _count(environ[variable].rpartition(":")[2], variable, "processes"), variable
    return None
