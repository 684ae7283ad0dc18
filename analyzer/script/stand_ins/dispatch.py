"""The stand-ins by name."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner

PYTHONS = ("python", "python3", "python2", *(f"python3.{minor}" for minor in range(8, 16)))
LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "megatron", "swift", "llamafactory-cli")
MPI = (
    "mpirun", "mpirun.openmpi", "mpirun.mpich", "mpirun_rsh", "mpiexec", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra",
    "orterun", "prterun", "horovodrun", "aprun",
)  # fmt: skip
SCHEDULERS = ("srun", "salloc", "sbatch", "ray", "nsys", "ncu", "rocprof", "rocprofv3", "rocprof-sys-run")
CONTAINERS = ("docker", "nvidia-docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "shifter")
PREFIXES = (
    "env", "nohup", "timeout", "stdbuf", "time", "xargs", "numactl", "taskset", "nice", "ionice", "chrt", "setsid", "strace",
    "unbuffer", "catchsegv", "dumb-init", "tini", "su", "sudo", "conda", "mamba", "micromamba", "uv", "poetry", "pixi", "pdm",
    "rye", "hatch", "ssh", "pdsh", "clush", "tmux", "screen",
)  # fmt: skip
READING = ("sleep", "tail", "find", "git", "pip", "pip3", "scontrol", "nvidia-smi")
SHELL = ("sh", "dash")
CHANGING = (
    "rm", "unlink", "shred", "mv", "dd", "truncate", "kill", "pkill", "killall", "killall5", "skill", "fuser", "scancel",
    "scp", "rsync", "sftp", "pdcp", "rpdcp", "ansible", "ansible-playbook", "wget", "curl", "aria2c", "axel", "aws", "gsutil",
    "gcloud", "az", "azcopy", "rclone", "s3cmd", "s5cmd", "oss", "ossutil", "ossutil64", "hdfs", "hadoop", "huggingface-cli", "hf",
    "modelscope", "wandb", "kubectl", "helm", "apt", "apt-get", "aptitude", "dpkg", "yum", "dnf", "rpm", "zypper", "apk", "brew",
    "snap", "npm", "easy_install", "shutdown", "reboot", "halt", "poweroff", "init", "telinit", "systemctl", "service", "crontab",
    "at", "batch", "mount", "umount", "mkfs", "mkfs.ext4", "mkfs.xfs", "wipefs", "fdisk", "parted", "swapoff", "swapon", "sysctl",
    "modprobe", "rmmod", "insmod", "ldconfig", "useradd", "userdel", "passwd", "mail", "sendmail", "nvidia-cuda-mps-control",
    "ipcrm", "watch", "bkill", "qdel", "fusermount", "losetup", "iptables", "ufw", "bsub", "jsrun", "ibrun", "flux", "oarsub",
    "qrsh", "yhrun", "docker-compose", "ch-run", "sarus", "udocker", "torchx", "colossalai", "composer", "sky", "runai", "msrun",
    "pipx", "pssh", "parallel-ssh", "rsh",
)  # fmt: skip
"""Commands that are never run, except with --info-run-all."""
IF_MISSING = ("module", "ml", "squeue", "sacct", "sinfo", "sstat", "qstat")
"""Commands that do nothing on a machine without them."""


def names(*, run_all: bool) -> tuple[str, ...]:
    """The names of all stand-ins; `run_all`: without those of commands that are only kept from running."""
    always = (*PYTHONS, *LAUNCHERS, *MPI, *SCHEDULERS, *CONTAINERS, *PREFIXES, *READING, *SHELL, *IF_MISSING, "qsub")
    return always if run_all else (*always, *CHANGING)


def run_stand_in(written: str, words: list[str]) -> int:
    """Does what stands for the command `written` with its `words`, and returns the exit status."""
    name = os.path.basename(written)
    if name in PYTHONS:
        return _python(written, words)
    if name in LAUNCHERS:
        return _launcher(written, words)
    if name in SHELL:
        return inner.start_shell(words)
    if name in IF_MISSING:
        return 0 if context.behind(name) is None else context.run_behind(name, words)
    if name in READING:
        from analyzer.script.stand_ins import harmless

        simple = {
            "sleep": harmless.sleep, "tail": harmless.tail, "find": harmless.find, "git": harmless.git,
            "scontrol": harmless.scontrol, "nvidia-smi": harmless.nvidia_smi,
        }  # fmt: skip
        return simple[name](words) if name in simple else harmless.pip(name, words)
    if name in CONTAINERS:
        return _container(name, words)
    if name in PREFIXES:
        return _prefix(name, words)
    if name in (*MPI, *SCHEDULERS, "qsub"):
        return _scheduler(name, words)
    if context.run_all():
        return context.run_behind(written, words)
    return context.not_run([name, *words])


def _python(written: str, words: list[str]) -> int:
    from analyzer.script.stand_ins.python_command import launch_of, read_python

    argv = launch_of(words)
    if argv is not None:
        from analyzer.script.stand_ins.records import record

        return record(argv, written, words)
    command = read_python(words)
    if command.module == "pip" and not context.run_all():
        from analyzer.script.stand_ins.harmless import pip

        if command.arguments[:1] not in (["list"], ["show"], ["freeze"], ["check"], ["--version"], ["-V"]):
            return pip(f"{written} -m pip", command.arguments)
    if words[:1] == ["-c"] and "device_count" in "".join(words[1:2]):
        from analyzer.script.stand_ins.harmless import counted_by_python

        if counted_by_python(words[1]):
            return 0
    if os.path.basename(command.script or "") == "setup.py" and not context.run_all():
        return context.not_run([written, *words])
    return context.run_behind(written, words)


def _launcher(written: str, words: list[str]) -> int:
    from analyzer.script.stand_ins.records import record

    name = os.path.basename(written)
    if not words or words[0] in ("-h", "--help", "--version"):
        return 0
    if name in ("torchrun", "deepspeed"):
        from analyzer.script.stand_ins.python_command import is_tool

        if is_tool(words):
            return context.not_run([name, *words])
        return record([name, *words], written, words)
    if name == "accelerate":
        return record([name, *words], written, words) if words[0] == "launch" else 0
    if words[0] in ("sft", "pt", "rlhf", "train"):
        return record(words[1:], written, words)
    return context.not_run([name, *words])


def _container(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import containers

    if name in ("singularity", "apptainer"):
        return containers.singularity(name, words)
    if name == "enroot":
        return containers.enroot(words)
    return containers.shifter(words) if name == "shifter" else containers.docker(name, words)


def _prefix(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import prefixes, remote

    if name in remote.SYNTAX:
        return remote.remote(name, words)
    if name in ("tmux", "screen"):
        return remote.terminal(name, words)
    if name in ("env", "sudo"):
        return prefixes.env(words) if name == "env" else prefixes.sudo(words)
    if name in prefixes.KEPT:
        return prefixes.kept(name, words)
    return prefixes.dropped(name, words) if name in prefixes.DROPPED else prefixes.runner(name, words)


def _scheduler(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import wrappers

    simple = {
        "srun": wrappers.srun, "salloc": wrappers.salloc, "sbatch": wrappers.sbatch, "qsub": wrappers.sbatch,
        "ray": wrappers.ray, "nsys": wrappers.nsys,
    }  # fmt: skip
    if name in simple:
        return simple[name](words)
    return wrappers.mpirun(words) if name in MPI else wrappers.profiler(name, words)
