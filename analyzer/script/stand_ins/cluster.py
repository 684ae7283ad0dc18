"""Answers of Ray and Slurm about a cluster with the nodes and GPUs of the job, and without other jobs."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, gpus
from analyzer.script.stand_ins.words import Syntax, last, split_words

LINE = "-" * 63
RAY_LIST = Syntax(short="f", flags="detail help")


def ray(words: list[str]) -> int:
    """Prints the state of a cluster for `ray status` and `ray list nodes`. Others, such as `ray start`, do nothing."""
    if context.run_all():
        return context.run_behind("ray", words)
    lines: list[str] | None = None
    if words[:1] == ["status"]:
        lines = _status()
    elif words[:2] == ["list", "nodes"]:
        lines = _nodes(words[2:])
    elif words[:1] == ["health-check"]:
        lines = []
    if lines is None:
        return context.not_run(["ray", *words])
    os.write(1, "".join(f"{line}\n" for line in lines).encode())
    return 0


def _status() -> list[str]:
    """What `ray status` prints (Ray 2.9 to 2.50)."""
    nodes = gpus.nodes_of_job()
    return [
        "======== Autoscaler status: 2025-01-01 00:00:00.000000 ========",
        "Node status", LINE,
        "Active:", *(f" 1 node_{_id(index)}" for index in range(nodes)),
        "Pending:", " (no pending nodes)",
        "Recent failures:", " (no failures)",
        "",
        "Resources", LINE,
        "Usage:",
        f" 0.0/{16.0 * gpus.of_job() * nodes} CPU",
        f" 0.0/{float(gpus.of_job() * nodes)} GPU",
        " 0B/1.00TiB memory",
        " 0B/186.26GiB object_store_memory",
        "",
        "Demands:", " (no resource demands)",
    ]  # fmt: skip


def _nodes(words: list[str]) -> list[str]:
    """What `ray list nodes` prints."""
    rows = [(_id(index), f"10.0.0.{index + 1}", str(index == 0)) for index in range(gpus.nodes_of_job())]
    form = last(split_words(words, RAY_LIST)[0], "format") or "default"
    if form == "json":
        import json

        keys = ("node_id", "node_ip", "state", "is_head_node")
        return [json.dumps([dict(zip(keys, (*row[:2], "ALIVE", row[2] == "True"), strict=True)) for row in rows])]
    line = "-" * 30
    heads = ["======== List: 2025-01-01 00:00:00.000000 ========", "Stats:", line, f"Total: {len(rows)}", "", "Table:", line]
    names = f"    {'NODE_ID':56}  {'NODE_IP':15}  IS_HEAD_NODE    STATE"
    return [*heads, names, *(f"{index:2}  {row[0]}  {row[1]:15}  {row[2]:12}    ALIVE" for index, row in enumerate(rows))]


def _id(index: int) -> str:
    return f"{index + 1:056x}"


def scontrol(words: list[str]) -> int:
    """Prints host names and the own job as Slurm's program, which need not be installed. Changes nothing."""
    if context.run_all() and context.behind("scontrol") is not None:
        return context.run_behind("scontrol", words)
    command = split_words(words, Syntax(short="M", flags="all details oneliner quiet verbose hide local future"))[1]
    if command[:1] != ["show"]:
        return context.not_run(["scontrol", *words])
    shown = (command[1:2] or [""])[0]
    if len(shown) > 4 and "hostnames".startswith(shown):
        from analyzer.script.stand_ins.slurm import host_names

        listed = command[2] if len(command) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        os.write(1, "".join(f"{name}\n" for name in host_names(listed)).encode())
    elif shown.startswith("hostlist"):
        os.write(1, f"{','.join(command[2:3])}\n".encode())
    elif shown in ("job", "jobs", "jobid") and command[2:3] == [os.environ.get("SLURM_JOB_ID", "")]:
        os.write(1, _job("oneliner" in "".join(words) or "-o" in words).encode())
    return 0


def _job(one_line: bool) -> str:
    """What `scontrol show job` prints for the job that runs."""
    environ = os.environ
    fields = [
        f"JobId={environ['SLURM_JOB_ID']} JobName={environ.get('SLURM_JOB_NAME', 'job')}",
        "JobState=RUNNING Reason=None Dependency=(null)",
        f"Partition={environ.get('SLURM_JOB_PARTITION', 'gpu')}",
        f"NodeList={environ.get('SLURM_JOB_NODELIST', '')}",
        f"NumNodes={environ.get('SLURM_NNODES', '1')} NumTasks={environ.get('SLURM_NTASKS', '1')}",
        f"Command={environ.get(context.BATCH_VARIABLE, '').rpartition(':')[2]}",
        f"WorkDir={environ.get('SLURM_SUBMIT_DIR', os.getcwd())}",
    ]
    return (" " if one_line else "\n   ").join(fields) + "\n"
