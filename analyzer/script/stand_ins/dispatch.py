"""The stand-ins by name."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner, launchers

NETWORK = (
    "git", "pip", "pip3", "curl", "wget", "wget2", "aria2c", "axel", "rsync", "scp", "crontab", "sysctl", "mount", "dpkg", "rpm",
    "npm", "huggingface-cli", "hf", "nvidia-cuda-mps-control",
)  # fmt: skip
"""Commands that are run only with words for which they need no network, service or other rights."""
ANSWERED = (
    "nc", "ncat", "netcat", "telnet", "socat", "ping", "ping6", "fping", "getent", "nslookup", "host", "dig", "hostname", "ip",
    "ifconfig", "redis-cli", "etcdctl", "pg_isready", "mysqladmin", "inotifywait",
)  # fmt: skip
"""Commands that wait for another machine or ask about it, which is answered at once."""
NOT_RUN = (
    "sftp", "pdcp", "rpdcp", "sbcast", "globus", "aws", "gsutil", "gcloud", "az", "azcopy", "rclone", "s3cmd", "s5cmd", "mc", "oss",
    "ossutil", "ossutil64", "coscli", "obsutil", "tosutil", "hdfs", "hadoop", "modelscope", "kaggle", "gdown", "wandb", "swanlab",
    "clearml-task", "mlflow",  # files of other machines, and services
    "helm", "skopeo", "buildah", "ansible", "ansible-playbook", "ssh-copy-id", "ssh-keyscan", "nmap", "mail", "mailx", "sendmail",
    "mutt", "apt", "apt-get", "aptitude", "yum", "dnf", "microdnf", "zypper", "apk", "brew", "snap", "yarn", "pnpm", "easy_install",
    "pipx",  # installations
    "scancel", "scrontab", "sacctmgr", "squeue", "sacct", "sinfo", "sstat", "sprio", "sshare", "sreport", "qstat", "qdel", "bkill",
    "bjobs", "at", "batch",  # queues
    "bsub", "jsrun", "ibrun", "flux", "oarsub", "qrsh", "yhrun", "torchx", "colossalai", "composer", "sky", "runai",
    "msrun",  # launchers that are not read
    "systemctl", "service", "hostnamectl", "timedatectl", "loginctl", "ntpdate", "chronyc", "dcgmi", "nv-hostengine",
    "nvidia-persistenced", "nvidia-settings", "nvidia-modprobe", "gpustat", "nvtop", "dmesg",  # daemons and devices
    "shutdown", "reboot", "halt", "poweroff", "init", "telinit", "umount", "fusermount", "losetup", "mkfs", "mkfs.ext4", "mkfs.xfs",
    "wipefs", "fdisk", "parted", "swapoff", "swapon", "modprobe", "rmmod", "insmod", "ldconfig", "iptables", "ufw", "useradd",
    "userdel", "groupadd", "usermod", "passwd", "chpasswd",  # rights of an administrator
    "pkill", "killall", "killall5", "skill", "fuser",  # programs that end processes by a property, and may find the script itself
    "watch",  # does not end
)  # fmt: skip
"""Commands that do nothing, except with --info-run-all. Each would fail or wait, or end the script, and so hide its launch."""
GROUPS = {
    "python": launchers.PYTHONS,
    "launcher": launchers.LAUNCHERS,
    "shell": ("sh", "dash"),
    "module": ("module", "ml"),
    "scheduler": (*launchers.MPI, *launchers.BATCH, *launchers.PROFILERS, "ray"),
    "container": launchers.CONTAINERS,
    "prefix": launchers.PREFIXES,
    "runner": launchers.RUNNERS,
    "remote": (*launchers.REMOTE, *launchers.TERMINALS),
    "cluster": ("scontrol", "nvidia-smi", "tail"),
    "network": NETWORK,
    "answered": (*ANSWERED, "sleep"),
    "not_run": NOT_RUN,
}
"""The names of the stand-ins by what they do."""
NOT_REPLACED_WITH_RUN_ALL = ("network", "answered", "not_run")
GROUP_OF = {name: group for group, members in GROUPS.items() for name in members}


def names(*, run_all: bool) -> tuple[str, ...]:
    """The names of all stand-ins; `run_all`: without those of commands that are only kept from running."""
    return tuple(name for name, group in GROUP_OF.items() if not (run_all and group in NOT_REPLACED_WITH_RUN_ALL))


def run_stand_in(written: str, words: list[str]) -> int:
    """Does what stands for the command `written` with its `words`, and returns the exit status."""
    name = os.path.basename(written)
    group = GROUP_OF.get(name, "not_run")
    if group == "python":
        return _python(written, words)
    if group == "launcher":
        return _launcher(written, words)
    if group == "shell":
        return inner.start_shell(words)
    if group in HANDLERS:
        return HANDLERS[group](name, words)
    if context.run_all():
        return context.run_behind(written, words)
    from analyzer.script.stand_ins import network

    return network.not_run([name, *words])


def _python(written: str, words: list[str]) -> int:
    from analyzer.script.stand_ins.python_command import launch_of, prepares, read_python

    argv = launch_of(words)
    if argv is not None:
        from analyzer.script.stand_ins.records import record

        return record(argv, written, words)
    command = read_python(words)
    if command.module == "pip":
        from analyzer.script.stand_ins.network import pip

        status = pip(f"{written} -m pip", command.arguments)
        if status is not None:
            return status
    if words[:1] == ["-c"] and "device_count" in "".join(words[1:2]):
        from analyzer.script.stand_ins.gpus import counted_by_python

        if counted_by_python(words[1]):
            return 0
    if not context.run_all() and (os.path.basename(command.script or "") == "setup.py" or prepares(words)):
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
    if words[0] in launchers.TRAINING_COMMANDS[name]:
        # the words of ms-swift's commands say whether Megatron-LM trains
        return record([name, *words] if name in ("megatron", "swift") and words[0] != "train" else words[1:], written, words)
    return context.not_run([name, *words])


def _module(name: str, words: list[str]) -> int:
    return 0 if context.behind(name) is None else context.run_behind(name, words)


def _scheduler(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import wrappers

    simple = {
        "srun": wrappers.srun, "salloc": wrappers.salloc, "sbatch": wrappers.sbatch, "qsub": wrappers.sbatch,
        "ray": wrappers.ray, "nsys": wrappers.nsys,
    }  # fmt: skip
    if name in simple:
        return simple[name](words)
    return wrappers.mpirun(words) if name in launchers.MPI else wrappers.profiler(name, words)


def _container(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins.containers import container

    return container(name, words)


def _prefix(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import prefixes

    return prefixes.prefix(name, words)


def _runner(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import runners

    return runners.runner(name, words)


def _remote(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import remote

    return remote.terminal(name, words) if name in launchers.TERMINALS else remote.remote(name, words)


def _cluster(name: str, words: list[str]) -> int:
    if name == "tail":
        from analyzer.script.stand_ins.answers import tail

        return tail(words)
    if name == "scontrol":
        from analyzer.script.stand_ins.cluster import scontrol

        return scontrol(words)
    from analyzer.script.stand_ins.gpus import nvidia_smi

    return nvidia_smi(words)


def _network(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import network

    return network.network(name, words)


def _answered(name: str, words: list[str]) -> int:
    from analyzer.script.stand_ins import answers

    return answers.sleep(words) if name == "sleep" else answers.answer(name, words)


HANDLERS = {
    "module": _module, "scheduler": _scheduler, "container": _container,
    "prefix": _prefix, "runner": _runner, "remote": _remote, "cluster": _cluster, "network": _network, "answered": _answered,
}  # fmt: skip
"""What does the work of the other groups."""
