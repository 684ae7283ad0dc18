"""Stand-ins that do nothing, or print what a script reads: sleep, tail -f, nvidia-smi, scontrol."""

from __future__ import annotations

import os
import time

from analyzer.script.stand_ins import context
from analyzer.script.stand_ins.words import Syntax, split_words, whole

LONGEST_SLEEP = 0.05
"""Seconds."""
SLEEPS = 100
"""Number of sleeps of the script itself after which it is ended: it waits for something that does not happen."""
READING_GIT = frozenset({"rev-parse", "log", "status", "diff", "describe", "show", "branch", "ls-files", "version", "rev-list"})
GPUS = 8


def sleep(words: list[str]) -> int:
    """Waits for a moment, so that a loop does not use a whole core."""
    if context.run_all():
        return context.run_behind("sleep", words)
    try:
        seconds = float((words or ["0"])[0].rstrip("smhd"))
    except ValueError:
        seconds = LONGEST_SLEEP
    time.sleep(min(max(seconds, 0.0), LONGEST_SLEEP))
    if os.getppid() == os.getpgrp():
        path = os.path.join(context.folder(), "sleeps")
        with open(path, "ab") as file:
            file.write(b".")
        if os.path.getsize(path) >= SLEEPS:
            from analyzer.script.stand_ins.records import stop

            stop("sleeps")
    return 0


def tail(words: list[str]) -> int:
    """Does not follow a file, which does not grow."""
    follows = any(word.startswith("--follow") or (word[:1] == "-" and word[1:2] != "-" and set("fF") & set(word)) for word in words)
    return 0 if follows else context.run_behind("tail", words)


def find(words: list[str]) -> int:
    """Does not delete files."""
    deletes = "-delete" in words and not context.run_all()
    return context.not_run(["find", *words]) if deletes else context.run_behind("find", words)


def git(words: list[str]) -> int:
    """Runs only commands that read."""
    command = split_words(words, Syntax(short="Cc", flags="version no-pager"))[1]
    if context.run_all() or not command or command[0] in READING_GIT:
        return context.run_behind("git", words)
    return context.not_run(["git", *words])


def pip(name: str, words: list[str]) -> int:
    """Runs only commands that read."""
    if context.run_all() or words[:1] in (["list"], ["show"], ["freeze"], ["check"], ["--version"], ["-V"]):
        return context.run_behind(name, words)
    return context.not_run([name, *words])


def scontrol(words: list[str]) -> int:
    """Prints host names as Slurm's own program, which need not be installed. Changes nothing."""
    if words[:1] == ["show"] and words[1:2] and "hostnames".startswith(words[1]) and len(words[1]) > 4:
        from analyzer.script.stand_ins.slurm import host_names

        listed = words[2] if len(words) > 2 else os.environ.get("SLURM_JOB_NODELIST", "")
        os.write(1, "".join(f"{name}\n" for name in host_names(listed)).encode())
        return 0
    if words[:1] == ["show"] and context.behind("scontrol") is not None:
        return context.run_behind("scontrol", words)
    return 0 if words[:1] == ["show"] else context.not_run(["scontrol", *words])


def gpus() -> int:
    """The number of GPUs of a node, for a script that counts them on a machine without: those of the job, or eight."""
    return whole(os.environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]) or GPUS


def counted_by_python(code: str) -> bool:
    """Prints the number of GPUs if the Python code prints PyTorch's, and there is no driver. Returns whether it did."""
    if "print(torch.cuda.device_count())" not in code or context.behind("nvidia-smi") is not None:
        return False
    context.say(f"no GPU is found: torch.cuda.device_count() is {gpus()}")
    os.write(1, f"{gpus()}\n".encode())
    return True


def nvidia_smi(words: list[str]) -> int:
    """Prints eight GPUs, or those of the job, if there is no driver. Changes nothing."""
    changing = {"-pm", "-pl", "-lgc", "-rgc", "-ac", "-rac", "-r", "--gpu-reset", "-mig", "-c", "-i"} & set(words)
    if context.behind("nvidia-smi") is not None and (context.run_all() or not changing - {"-i"}):
        return context.run_behind("nvidia-smi", words)
    if changing - {"-i"}:
        return context.not_run(["nvidia-smi", *words])
    count = gpus()
    context.say(f"nvidia-smi is not installed: {count} GPUs are printed")
    query = next((word for word in words if word.startswith("--query-gpu")), None)
    if query is not None:
        fields = query.partition("=")[2].split(",")
        header = [] if any("noheader" in word for word in words) else [", ".join(fields)]
        known = {"count": str(count), "name": "NVIDIA GPU", "gpu_name": "NVIDIA GPU"}
        rows = [", ".join(str(index) if field == "index" else known.get(field, "0") for field in fields) for index in range(count)]
        lines = [*header, *rows]
    else:
        lines = [f"GPU {index}: NVIDIA GPU (UUID: GPU-{index})" for index in range(count)]
    os.write(1, "".join(f"{line}\n" for line in lines).encode())
    return 0
