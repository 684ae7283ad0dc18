"""The number of processes of mpirun and mpiexec."""

from __future__ import annotations

import os

from analyzer.script.stand_ins.words import Syntax, last, split_words, whole

VALUES = (
    "np c n N npernode npersocket map-by rank-by bind-to H host hosts hostfile machinefile f ppn perhost wdir wd output-filename "
    "timeout tune am prefix rf rankfile path report-uri stdin bootstrap launcher iface binding rmk configfile envlist genvlist "
    "max-restarts dvm-uri personality"
).split()
PAIRS = {"mca": 2, "gmca": 2, "pmixmca": 2, "prtemca": 2, "genv": 2, "env": 2}
"""Options with two words."""
FLAGS = (
    "allow-run-as-root oversubscribe nooversubscribe bind-to-core bycore bynode byslot bysocket report-bindings display-map "
    "display-allocation tag-output timestamp-output verbose v V q quiet merge-stderr-to-stdout use-hwthread-cpus pernode "
    "do-not-launch help h version prepend-rank l genvall envall envnone genvnone print-all-exitcodes no-local xterm "
    "get-stack-traces enable-recovery tv debug index-argv-by-rank forward-signals continuous leave-session-attached"
).split()


def split(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The options before the command, and the command. An option has one or two dashes. Sets the variables that they export."""
    syntax = Syntax(flags=" ".join(FLAGS), single=" ".join([*VALUES, *FLAGS, *PAIRS, "x"]))
    options: list[tuple[str, str]] = []
    rest = words
    while True:
        position = next(
            (index for index, word in enumerate(rest) if word.lstrip("-") in (*PAIRS, "x") and word.startswith("-")), None
        )
        found, command = split_words(rest if position is None else rest[:position], syntax)
        options += found
        if position is None or command:
            return options, command if position is None else [*command, *rest[position:]]
        name = rest[position].lstrip("-")
        values = rest[position + 1 : position + 1 + PAIRS.get(name, 1)]
        _exported(name, values)
        rest = rest[position + 1 + len(values) :]


def _exported(name: str, values: list[str]) -> None:
    """Sets the variable of `-x NAME=VALUE`, `-genv NAME VALUE` or `-env NAME VALUE`."""
    if name == "x" and "=" in values[0]:
        variable, _, value = values[0].partition("=")
        os.environ[variable] = value
    elif name in ("genv", "env") and len(values) == 2:
        os.environ[values[0]] = values[1]


def variables(options: list[tuple[str, str]], command: list[str]) -> dict[str, str]:
    """The environment variables of the first process. The sizes are left out if nothing gives them."""
    size, local = sizes(options)
    for position, word in enumerate(command):
        if word == ":" and size:
            size += whole(last(split(command[position + 1 :])[0], "np", "n", "c")) or 0
    found = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMI_RANK": "0", "PMIX_RANK": "0"}
    if size:
        found |= {"OMPI_COMM_WORLD_SIZE": str(size), "PMI_SIZE": str(size), "OMPI_UNIVERSE_SIZE": str(size)}
    if local:
        found |= {"OMPI_COMM_WORLD_LOCAL_SIZE": str(local), "MPI_LOCALNRANKS": str(local)}
    return found


def sizes(options: list[tuple[str, str]]) -> tuple[int | None, int | None]:
    """The number of processes, and of processes per node."""
    size = whole(last(options, "np", "n", "c"))
    local = whole(last(options, "npernode", "N", "ppn", "perhost"))
    if last(options, "pernode") is not None:
        local = 1
    mapped = (last(options, "map-by") or "").split(":")
    if mapped[0] == "ppr" and len(mapped) > 2 and mapped[2].startswith("node"):
        local = whole(mapped[1])
    hosts, slots = _hosts(options)
    if size is None and local is not None:
        size = hosts * local if hosts else None
    if size is None:
        size = slots
    if local is None and hosts and slots and slots % hosts == 0:
        local = slots // hosts
    return size, min(local, size) if local and size else local


def _hosts(options: list[tuple[str, str]]) -> tuple[int, int | None]:
    """The number of hosts, and the number of their slots if it is given for all."""
    listed = [each for each in (last(options, "H", "host", "hosts") or "").split(",") if each]
    lines = [(each.partition(":")[0], whole(each.partition(":")[2])) for each in listed]
    file = last(options, "hostfile", "machinefile", "f")
    if file and not lines:
        try:
            with open(file, encoding="utf-8") as text:
                lines = [_host_of_line(line) for line in text if line.split("#")[0].strip()]
        except OSError:
            return 0, None
    known = [slots for _, slots in lines if slots]
    return len({name for name, _ in lines}), sum(known) if known and len(known) == len(lines) else None


def _host_of_line(line: str) -> tuple[str, int | None]:
    """Name and slots of `node1 slots=8` or `node1:8`."""
    name, *rest = line.split("#")[0].split()
    slots = next((each.partition("=")[2] for each in rest if each.startswith("slots=")), name.partition(":")[2])
    return name.partition(":")[0], whole(slots)
