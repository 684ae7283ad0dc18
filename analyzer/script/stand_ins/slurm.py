"""Slurm's options and environment variables, as far as they give the size of a job (Slurm 24.05, man pages of sbatch and srun)."""

from __future__ import annotations

import os

from analyzer.script.stand_ins.words import MAX_DIGITS, Syntax, last, split_words, whole

SYNTAX = Syntax(
    short="ABbCcDdeFGiJLMmNnopqrStTWwx",
    flags="help usage version contiguous exact external-launcher hold ignore-pbs label multi-prog no-kill no-allocate no-shell "
    "no-requeue overcommit overlap oversubscribe parsable preserve-env pty quiet reboot requeue spread-job stepmgr test-only "
    "unbuffered use-min-nodes verbose wait-all-nodes whole container-mount-home no-container-mount-home container-remap-root "
    "no-container-remap-root container-entrypoint no-container-entrypoint container-writable container-readonly",
    attached="bcast compress exclusive get-user-env immediate kill-on-bad-exit nice propagate resv-ports send-libs x11 wait pty",
)
NODES = ("nodes", "N")
TASKS = ("ntasks", "n")
TASKS_PER_NODE = ("ntasks-per-node", "tasks-per-node")
COMMENT = "#SBATCH"


def read_header(path: str) -> list[tuple[str, str]]:
    """The options of the #SBATCH lines of a script. They end at the first line that is neither a comment nor empty."""
    options: list[tuple[str, str]] = []
    with open(path, encoding="utf-8", errors="replace") as script:
        for line in script:
            if line.strip() and not line.startswith("#"):
                break
            if line.startswith(COMMENT):
                words = _words(line[len(COMMENT) :])
                options += split_words(words, SYNTAX)[0]
    return options


def _words(text: str) -> list[str]:
    """The words of an #SBATCH line without its comment."""
    import shlex

    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def resources(options: list[tuple[str, str]]) -> dict[str, int]:
    """The sizes that options give: nodes, tasks, tasks_per_node, gpus_per_node and cpus_per_task."""
    found = {
        "nodes": whole(last(options, *NODES)),
        "tasks": whole(last(options, *TASKS)),
        "tasks_per_node": whole(last(options, *TASKS_PER_NODE)),
        "gpus_per_node": _gpus_per_node(options),
        "cpus_per_task": whole(last(options, "cpus-per-task", "c")),
    }
    total = _of_type(last(options, "gpus", "G"))
    if total and not found["gpus_per_node"] and not found["nodes"] and total <= 8:
        found["nodes"] = 1
    if total and not found["gpus_per_node"] and found["nodes"]:
        found["gpus_per_node"] = max(1, total // found["nodes"])
    if total and not found["nodes"] and found["gpus_per_node"]:
        found["nodes"] = max(1, total // found["gpus_per_node"])
    return {name: value for name, value in found.items() if value}


def _gpus_per_node(options: list[tuple[str, str]]) -> int | None:
    direct = _of_type(last(options, "gpus-per-node"))
    if direct:
        return direct
    for listed in (last(options, "gres"), last(options, "tres-per-node")):
        for each in (listed or "").split(","):
            name, _, count = each.removeprefix("gres/").replace("=", ":").partition(":")
            if name == "gpu":
                return _of_type(count) or 1
    tasks, per_task = whole(last(options, *TASKS_PER_NODE)), _of_type(last(options, "gpus-per-task"))
    return tasks * per_task if tasks and per_task else None


def _of_type(text: str | None) -> int | None:
    """The number in `8`, `h100:8` or `gpu:h100:8(S:0-1)`."""
    return whole((text or "").partition("(")[0].rpartition(":")[2])


def job_variables(sizes: dict[str, int], *, name: str, folder: str) -> dict[str, str]:
    """The environment variables of a batch job of these sizes."""
    nodes = sizes.get("nodes", 1)
    hosts = "node001" if nodes == 1 else f"node[001-{nodes:03d}]"
    variables = {
        "SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_JOB_NAME": name, "SLURM_JOB_PARTITION": "gpu",
        "SLURM_CLUSTER_NAME": "cluster", "SLURM_SUBMIT_DIR": folder, "SLURM_SUBMIT_HOST": "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts, "SLURMD_NODENAME": "node001",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_ARRAY_TASK_ID": "0",
    }  # fmt: skip
    tasks, per_node = sizes.get("tasks"), sizes.get("tasks_per_node")
    if per_node:
        variables["SLURM_NTASKS_PER_NODE"] = str(per_node)
        tasks = tasks or nodes * per_node
    if tasks:
        variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = str(tasks)
        each = max(1, tasks // nodes)
        variables["SLURM_TASKS_PER_NODE"] = str(each) if nodes == 1 else f"{each}(x{nodes})"
    if "gpus_per_node" in sizes:
        gpus = sizes["gpus_per_node"]
        variables["SLURM_GPUS_PER_NODE"] = variables["SLURM_GPUS_ON_NODE"] = str(gpus)
        variables["SLURM_GPUS"] = str(gpus * nodes)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
    if "cpus_per_task" in sizes:
        variables["SLURM_CPUS_PER_TASK"] = variables["SLURM_CPUS_ON_NODE"] = str(sizes["cpus_per_task"])
    return variables


def batch_variables(options: list[tuple[str, str]], *, script: str, folder: str) -> dict[str, str]:
    """The environment variables that a batch job with these options has; none without options."""
    if not options:
        return {}
    name = last(options, "job-name", "J") or os.path.basename(script)
    return job_variables(resources(options), name=name, folder=folder)


def step_variables(options: list[tuple[str, str]], environ: dict[str, str]) -> dict[str, str]:
    """The environment variables that srun with these options sets for its first task.

    SLURM_STEP_NUM_TASKS is set only if an option of srun or of the job gives the number of tasks, so that srun's default of one
    task per node is not taken for the number of GPUs.
    """
    given = resources(options)
    nodes = given.get("nodes") or whole(environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES"))
    per_node = given.get("tasks_per_node")
    tasks = given.get("tasks")
    if tasks and per_node and "nodes" not in given:
        nodes = max(1, tasks // per_node)
    if not tasks and per_node:
        tasks = (nodes or 1) * per_node
    if not tasks and not per_node:
        inherited = whole(environ.get("SLURM_NTASKS_PER_NODE"))
        if "nodes" in given and inherited:
            tasks = given["nodes"] * inherited
        else:
            tasks = whole(environ.get("SLURM_NTASKS")) or (inherited * nodes if inherited and nodes else None)
    variables = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}
    if nodes:
        variables["SLURM_NNODES"] = variables["SLURM_JOB_NUM_NODES"] = variables["SLURM_STEP_NUM_NODES"] = str(nodes)
    if tasks:
        variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = variables["SLURM_STEP_NUM_TASKS"] = str(tasks)
        if nodes and tasks % nodes == 0:
            variables["SLURM_NTASKS_PER_NODE"] = str(tasks // nodes)
    gpus = given.get("gpus_per_node") or whole(environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2])
    if gpus:
        variables["SLURM_GPUS_PER_NODE"] = str(gpus)
    for name, value in job_variables({"nodes": nodes or 1}, name="job", folder=os.getcwd()).items():
        if name not in variables and name not in environ:
            variables[name] = value
    return variables


def host_names(listed: str) -> list[str]:
    """The names of a node list such as `node[001-003,007],login1`."""
    names: list[str] = []
    for each in _split_outside_brackets(listed):
        head, bracket, rest = each.partition("[")
        if not bracket:
            names.append(each)
            continue
        ranges, _, tail = rest.partition("]")
        for one in ranges.split(","):
            first, dash, final = one.partition("-")
            if dash and first.isdecimal() and final.isdecimal() and len(final) <= MAX_DIGITS:
                names += [f"{head}{number:0{len(first)}d}{tail}" for number in range(int(first), int(final) + 1)]
            else:
                names.append(f"{head}{one}{tail}")
    return names


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]
