"""The number of processes of a launch, from torchrun's options or from environment variables of a scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError

USUAL_GPUS_PER_NODE: Final = 8


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a launch, one for each GPU."""

    nodes: int
    gpus_per_node: int
    assumptions: tuple[str, ...] = ()
    """Assumptions about sizes that torchrun's options do not give, one sentence each."""

    @classmethod
    def of(cls, size: int) -> World:
        """A world of `size` ranks, with eight GPUs per node or fewer."""
        gpus_per_node = math.gcd(size, USUAL_GPUS_PER_NODE)
        return cls(size // gpus_per_node, gpus_per_node)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.gpus_per_node


def read_world(options: Iterable[tuple[str, str | None, str]], environ: Mapping[str, str]) -> World:
    """The world of torchrun's `options` (dest, value, flag as written), or without these of the environment.

    Raises InputError for sizes that are not positive integers or that contradict each other.
    """
    given = {dest: (value or "", written) for dest, value, written in options}
    assumptions: list[str] = []
    for dest in ("nnodes", "nproc_per_node"):
        variable = f"PET_{dest.upper()}"
        if dest not in given and environ.get(variable):
            given[dest] = (environ[variable], variable)
            flag = "--" + dest.replace("_", "-")
            assumptions.append(f"{variable}={environ[variable]} in the environment is used as torchrun's {flag}.")
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
        assumptions.append("--nproc-per-node is not given: torchrun starts 1 process per node.")
    return World(nodes, gpus_per_node, tuple(assumptions))


def _nodes(value: str, option: str, assumptions: list[str]) -> int:
    """N of 'N', or MAX of 'MIN:MAX'."""
    least, colon, most = value.partition(":")
    if not colon:
        return _count(value, option, "nodes")
    lower, upper = _count(least, option, "nodes"), _count(most, option, "nodes")
    if lower > upper:
        raise InputError(option, f"the minimum in {value} is above the maximum", f"write {upper}:{lower}")
    assumptions.append(f"{option} {value} is elastic: {upper} nodes are assumed.")
    return upper


def _gpus_per_node(value: str, option: str) -> int:
    if value in ("gpu", "auto", "cpu", "xpu", "privateuse"):
        raise InputError(option, f"{value!r} depends on the machine on which torchrun runs", f"write a number, such as {option} 8")
    return _count(value, option, "processes")


def _count(value: str, option: str, what: str) -> int:
    """A positive integer."""
    try:
        number = int(value)
    except ValueError:
        raise InputError(option, f"{value!r} is not an integer", f"write a number of {what}, such as 8") from None
    if number < 1:
        raise InputError(option, f"{value} is not above 0", f"write a number of {what}, such as 8")
    return number


def _world_of_environment(environ: Mapping[str, str]) -> World:
    """The world given by environment variables of a scheduler; one process without these."""
    found = _world_size(environ)
    if found is None:
        return World(1, 1, ("Neither torchrun's options nor the environment give the number of GPUs: 1 is assumed.",))
    size, source = found
    local = _local_size(environ)
    if local is None:
        gpus_per_node = math.gcd(size, USUAL_GPUS_PER_NODE)
        how = f"the number per node is not given, {gpus_per_node} are assumed"
    else:
        gpus_per_node, variable = local
        gpus_per_node = min(gpus_per_node, size)
        if size % gpus_per_node:
            raise InputError(
                source,
                f"{size} processes cannot be split into nodes of {gpus_per_node} ({variable})",
                "give --nnodes and --nproc-per-node",
            )
        how = f"{gpus_per_node} per node, from {variable}"
    return World(size // gpus_per_node, gpus_per_node, (f"{size} GPUs, from {source} in the environment; {how}.",))


def _world_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Total number of processes, and the environment variables that give it."""
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
    """Processes per node, and the environment variable that gives it. SLURM_GPUS_PER_NODE may include the GPU type: h100:8."""
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_GPUS_PER_NODE"):
        if environ.get(variable):
            return _count(environ[variable].rpartition(":")[2], variable, "processes"), variable
    return None
