"""The number of processes from the environment variables of schedulers and of MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.launchers.world import USUAL_GPUS_PER_NODE, World, count

TASKS_OF_STEP: Final = "SLURM_STEP_NUM_TASKS"
"""srun sets it for the tasks that it starts. A batch script does not have it."""


def world_of_environment(environ: Mapping[str, str], gpus_per_node: int | None) -> World | None:
    """The world of a program that starts no other processes, or None. `gpus_per_node`: if given, wins over the environment."""
    found = _world_size(environ, gpus_per_node)
    if found is None:
        return None
    size, source, per_node_variables = found
    local = _local_size(environ, size, source, per_node_variables)
    if local is None:
        per_node = math.gcd(size, gpus_per_node or USUAL_GPUS_PER_NODE)
        how = f"the number per node is not given, {per_node} are assumed"
    else:
        per_node, variable = local
        how = f"{per_node} per node, from {variable}"
    return World(size // per_node, per_node, (f"{size} GPUs, from {source} in the environment; {how}.",))


def world_of_allocation(environ: Mapping[str, str], gpus_per_node: int | None) -> World | None:
    """The GPUs that Slurm gives to the job, for a launcher that starts one process for each of them; None if not known."""
    gpus = gpus_per_node or _of_type(environ, "SLURM_GPUS_PER_NODE") or _of_type(environ, "SLURM_GPUS_ON_NODE")
    nodes = _number(environ, "SLURM_NNODES") or _number(environ, "SLURM_JOB_NUM_NODES")
    if not gpus or not nodes:
        return None
    return World(nodes, gpus, (f"{nodes * gpus} GPUs: {gpus} on each of the {nodes} nodes that Slurm gives to the job.",))


def _world_size(environ: Mapping[str, str], gpus_per_node: int | None) -> tuple[int, str, Sequence[str]] | None:
    """Total number of processes, the variables that give it, and those that may give the number per node."""
    slurm = ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_NODE")
    mpi = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    for variable, local in (
        ("WORLD_SIZE", ("LOCAL_WORLD_SIZE", *mpi, *slurm)),
        ("OMPI_COMM_WORLD_SIZE", (*mpi, "SLURM_GPUS_PER_NODE")),
        ("PMI_SIZE", (*mpi, *slurm)),
        (TASKS_OF_STEP, slurm),
    ):
        if environ.get(variable):
            return count(environ[variable], variable, "processes"), variable, local
    allocation = world_of_allocation(environ, gpus_per_node)
    nodes, tasks = _number(environ, "SLURM_NNODES"), _number(environ, "SLURM_NTASKS")
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    if allocation is not None and (per_node in (None, 1)) and tasks in (None, 1, nodes):
        # one task per node starts the processes of the node
        return allocation.size, "SLURM_NNODES × SLURM_GPUS_PER_NODE", ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
    if tasks:
        return tasks, "SLURM_NTASKS", slurm
    if nodes and per_node:
        return nodes * per_node, "SLURM_NNODES × SLURM_NTASKS_PER_NODE", slurm
    nodes, per_node = _number(environ, "NNODES") or 1, _number(environ, "NPROC_PER_NODE")
    return (nodes * per_node, "NNODES × NPROC_PER_NODE", ("NPROC_PER_NODE",)) if per_node else None


def _local_size(environ: Mapping[str, str], size: int, source: str, variables: Sequence[str]) -> tuple[int, str] | None:
    """Processes per node, and the first environment variable that gives a divisor of the total number.

    Raises InputError if there are such variables and none gives a divisor.
    """
    if environ.get("LOCAL_WORLD_SIZE"):
        variables = ("LOCAL_WORLD_SIZE", *variables)
    found = [(min(number, size), variable) for variable in variables if (number := _of_type(environ, variable))]
    for number, variable in found:
        if size % number == 0:
            return number, variable
    if not found:
        return None
    number, variable = found[0]
    fault = f"{size} processes cannot be split into nodes of {number} ({variable})"
    raise InputError(source, fault, "give --nnodes and --nproc-per-node, or --info-world-size and --info-gpus-per-node")


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    return count(environ[variable], variable, "processes") if environ.get(variable) else None


def _of_type(environ: Mapping[str, str], variable: str) -> int | None:
    """The number in a variable that may include the GPU type: h100:8."""
    value = environ.get(variable, "").rpartition(":")[2]
    return count(value, variable, "processes") if value else None
