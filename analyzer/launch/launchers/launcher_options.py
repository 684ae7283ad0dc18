"""The options of launchers: torchrun (torch 2.13), deepspeed (DeepSpeed 0.17) and accelerate launch (Accelerate 1.10).

Sources: torch/distributed/run.py and launch.py, deepspeed/launcher/runner.py, accelerate/commands/launch.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from analyzer.errors import InputError

TORCHRUN: Final = "torchrun"
DEEPSPEED: Final = "deepspeed"
ACCELERATE: Final = "accelerate"
NAMES: Final = {
    "torchrun": TORCHRUN,
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "deepspeed.launcher.runner": DEEPSPEED,
    "accelerate": ACCELERATE,
    "accelerate.commands.launch": ACCELERATE,
}
"""Launchers by their name in a command."""


class OptionSet(NamedTuple):
    """The options of one launcher, by their names with underscores."""

    with_value: tuple[str, ...]
    without_value: tuple[str, ...]
    short: dict[str, str]
    families: tuple[str, ...] = ()
    """Beginnings of names of further options with a value."""

    @property
    def long(self) -> dict[str, str]:
        """The name of each spelling."""
        names = (*self.with_value, *self.without_value)
        return {spelling: name for name in names for spelling in ("--" + name.replace("_", "-"), "--" + name)}


SETS: Final = {
    TORCHRUN: OptionSet(
        with_value=(
            "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts",
            "monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee", "local_ranks_filter",
            "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr", "master_port", "local_addr",
            "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout",
        ),
        without_value=("standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env"),
        short={"-m": "module", "-r": "redirects", "-t": "tee"},
    ),
    DEEPSPEED: OptionSet(
        with_value=(
            "hostfile", "include", "exclude", "num_nodes", "min_elastic_nodes", "max_elastic_nodes", "num_gpus", "master_port",
            "master_addr", "node_rank", "launcher", "launcher_args", "enable_each_rank_log", "autotuning", "bind_core_list",
            "ssh_port", "venv_script",
        ),
        without_value=(
            "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "elastic_training",
            "bind_cores_to_rank",
        ),
        short={"-H": "hostfile", "-i": "include", "-e": "exclude", "-p": "ssh_port"},
    ),
    ACCELERATE: OptionSet(
        with_value=(
            "config_file", "num_processes", "num_machines", "num_cpu_threads_per_process", "machine_rank", "main_process_ip",
            "main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "role", "tee", "log_dir",
            "mixed_precision", "dynamo_backend", "dynamo_mode", "gpu_ids", "main_training_function", "gradient_accumulation_steps",
            "gradient_clipping", "mpirun_hostfile", "mpirun_ccl", "vm", "env", "tpu_name", "tpu_zone",
        ),
        without_value=(
            "module", "no_python", "cpu", "multi_gpu", "tpu", "ipex", "use_xpu", "quiet", "use_deepspeed", "use_fsdp",
            "use_megatron_lm", "use_tpu", "use_parallelism_config", "debug", "dynamo_use_fullgraph", "dynamo_use_dynamic",
            "dynamo_use_regional_compilation", "same_network", "enable_cpu_affinity", "downcast_bf16", "tpu_use_cluster",
            "tpu_use_sudo",
        ),
        short={"-m": "module", "-q": "quiet"},
        families=("fsdp_", "megatron_lm_", "fp8_", "deepspeed_", "zero", "offload_", "parallelism_config_", "aws_", "tpu_"),
    ),
}  # fmt: skip
LONG: Final = {launcher: options.long for launcher, options in SETS.items()}


class LauncherOption(NamedTuple):
    """An option of a launcher as given by one word."""

    dest: str
    written: str
    attached: str | None
    """The value in `--option=value` or `-t3`."""
    takes_value: bool


def find(word: str, *, launcher: str | None, before_script: bool) -> LauncherOption | None:
    """The option that `word` gives, or None.

    `launcher` is the launcher of the command line, None if it has none: the command may have been put in the place of any
    launcher. `before_script`: the training script is still to come. Options of deepspeed and accelerate are only found there, and
    unambiguous prefixes of torchrun's options are accepted there, as in argparse. Raises InputError for an ambiguous prefix, and
    for a value given to an option that takes none.
    """
    order = {None: (TORCHRUN, DEEPSPEED, ACCELERATE), TORCHRUN: (TORCHRUN,)}.get(launcher, (str(launcher), TORCHRUN))
    for name in order:
        if name == TORCHRUN or before_script:
            option = _find(word, name, families=name == launcher)
            if option is not None:
                return option
    if before_script and launcher in (None, TORCHRUN):
        return _abbreviation(word)
    return None


def _find(word: str, launcher: str, *, families: bool) -> LauncherOption | None:
    written, equals, value = word.partition("=")
    options = SETS[launcher]
    attached = value if equals else None
    dest = LONG[launcher].get(written) or options.short.get(written)
    attachable = word[2:3].isdigit() or launcher != TORCHRUN  # '-t3', but not '-tensor-model-parallel-size'
    if dest is None and attachable and word[:2] in options.short and options.short[word[:2]] in options.with_value:
        return LauncherOption(options.short[word[:2]], word[:2], word[2:], takes_value=True)
    if dest is None:
        name = written.removeprefix("--").replace("-", "_")
        member = families and written.startswith("--") and name.startswith(options.families or ("\0",))
        return LauncherOption(name, written, attached, takes_value=True) if member else None
    if attached is not None and dest not in options.with_value:
        raise InputError(written, f"takes no value, and {attached!r} is given", f"write {written} without a value")
    return LauncherOption(dest, written, attached, takes_value=dest in options.with_value)


def _abbreviation(word: str) -> LauncherOption | None:
    """The option of torchrun with the prefix `word`, None without one. Raises InputError if several have it."""
    written, equals, value = word.partition("=")
    if len(written) <= 3:
        return None
    dests = sorted({dest for spelling, dest in LONG[TORCHRUN].items() if spelling.startswith(written)})
    if len(dests) > 1:
        meant = " or ".join("--" + dest.replace("_", "-") for dest in dests)
        raise InputError(written, "is an ambiguous abbreviation", f"write {meant}")
    if not dests:
        return None
    full = _find(f"--{dests[0]}{equals}{value}", TORCHRUN, families=False)
    return full and full._replace(written=written)
