"""A launch script on the command line: runs it with stand-ins, and analyzes or prints the launches that they intercepted."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from analyzer.cli.output import print_message, standard_output
from analyzer.cli.what_ran import waits_left, what_ran
from analyzer.errors import FITS, InputError
from analyzer.launch.info_options import PREFIX, SCRIPT_ENDINGS, separated, takes_value
from analyzer.launch.written_files import files_of_launch
from analyzer.script.python_launchers import starts_a_launcher
from analyzer.script.run import Failure, Intercepted, ScriptRun, run_script
from analyzer.script.shebang import interpreter
from analyzer.script.uneven_nodes import together

SUFFIXES: Final = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".pbs", ".qsub", ".lsf", ".zsh", ".ksh")
SHELLS: Final = frozenset({"sh", "bash", "dash", "ksh", "zsh", "csh", "tcsh", "fish"})
STARTERS: Final = frozenset({"bash", "sh", "sbatch"})
"""Commands that may stand before the script."""
PRECEDENCE: Final = (70, 2, 3, 1, 0)
"""Of several launches, the exit status is the first of these that occurs."""
WRITTEN: Final = ("--info-json", "--info-html", "--info-timeline", "--info-record", "--info-search-csv")
"""Options that name a file to write, which is another one for each launch."""
OF_LAUNCH: Final = ("--info-megatron", "--info-model")
"""Options whose value may be a path, which the analysis reads in the folder of the launch."""
COMPARED: Final = ("--info-against", "--info-log")
"""Options that name an older report or the log of a run, which is another one for each launch as well."""
SHOWN_VARIABLES: Final = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_", "OMPI_COMM_WORLD_", "PMI_SIZE", "PET_", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_",
    "MEGATRON_", "NNODES", "NPROC_PER_NODE",
)  # fmt: skip
"""Beginnings of the names of variables that `--info-dry` prints."""
HIDDEN_VARIABLES: Final = frozenset({
    "SLURM_JOBID", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST", "SLURM_NODELIST", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEPID",
    "SLURM_STEP_ID", "SLURM_ARRAY_TASK_ID", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE",
})  # fmt: skip

READS_ARGUMENTS: Final = re.compile(
    r"\$\{?[#!]?[@*1-9#]|BASH_ARGV|\bshift\b|\bgetopts?\b|\$argv|\bfor \w+ *(?:;|\n|do\b)|set --|\bsource\b|^\s*\. ", re.M
)
"""What reads the arguments of a shell script: `$1`, `"$@"`, shift, getopts, `for word; do`. A file that it sources may."""

LONGEST_COMMAND: Final = 200
"""Characters of a command in an error."""

Analysis = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Analyzes the words of one launch in an environment and a folder, prints errors, and returns the exit status."""


def find_script(argv: Sequence[str]) -> int | None:
    """The position of the launch script in `argv`: its first word that is neither an --info option nor the value of one.

    None if that word is neither a shell script nor a Python file that starts a launcher. Raises InputError for a script that does
    not exist, and for an unknown --info option.
    """
    position = 0
    while position < len(argv):
        name, equals, _ = argv[position].partition("=")
        if not name.startswith(PREFIX):
            position += argv[position] in STARTERS and len(argv) > position + 1
            if argv[position].endswith(SCRIPT_ENDINGS) and not os.path.isfile(argv[position]):
                raise InputError(argv[position], "is not a file", "give the path of the launch script")
            return position if _is_script(argv[position], argv) else None
        position += 2 if takes_value(name) and not equals else 1
    return None


def _is_script(word: str, argv: Sequence[str]) -> bool:
    if word.startswith("-") or not os.path.isfile(word):
        return False
    if word.endswith(".py"):
        return starts_a_launcher(word, argv)
    if word.endswith(SUFFIXES):
        return True
    return not SHELLS.isdisjoint(interpreter(word))


def analyze_script(argv: Sequence[str], position: int, *, environ: Mapping[str, str], folder: Path, analysis: Analysis) -> int:
    """Runs the script at `position` of `argv`, and analyzes its launches. Returns the exit status.

    Raises InputError if the script ends before a launch, or cannot be run.
    """
    script = Path(argv[position])
    before = [word for word in argv[:position] if word not in STARTERS]
    given, arguments = separated([*before, *argv[position + 1 :]])
    flags = {word.partition("=")[0] for word in given}
    if "--info-launch" in flags:
        remedy = f"run bash {script} if the launch fits, or replace the launcher in it by get-training-info"
        raise InputError("--info-launch", "starts one launch command, and a script is given", remedy)
    if sys.stdout is not None:
        sys.stdout.flush()
    with run_script(script, arguments, environ=environ, folder=folder, run_all="--info-run-all" in flags) as ran:
        ran = replace(ran, launches=together(ran.launches))
        status = _report(ran, script, given, folder=folder, analysis=analysis)
    if arguments and not uses_arguments(script):
        print_message(f"{script} does not use its arguments, which have no effect: {shlex.join(arguments)}")
    return status


def _report(ran: ScriptRun, script: Path, given: Sequence[str], *, folder: Path, analysis: Analysis) -> int:
    """Analyzes or prints the launches of a script that ran. Returns the exit status. Raises InputError if there is none."""
    if not ran.launches:
        for wait in waits_left(ran):
            print_message(wait)
        raise _without_launch(script, ran)
    if ran.stopped:
        why = {"launches": "repeats a launch", "sleeps": "waits in a loop", "time": "does not end in time"}[ran.stopped]
        print_message(f"{script} was ended, because it {why}")
    statuses = [2] if ran.early_end else []
    if any(word == "--info-dry" for word in given):
        with standard_output() as stream:
            for number, launch in enumerate(ran.launches, 1):
                with files_of_launch(launch.written):
                    print(_dry(launch, _title(number, ran, script), given), file=stream)
        statuses.append(FITS)
    else:
        options = [word for word in given if word != "--info-run-all"]
        for number, launch in enumerate(ran.launches, 1):
            if len(ran.launches) > 1:
                _print_heading(number, ran, script, options)
            words = [*launch.argv, *_size_of_nodes(launch, options), *_numbered(options, number, folder)]
            with files_of_launch(launch.written):
                statuses.append(analysis(words, launch.environ, launch.folder))
    if ran.early_end:
        count = f"{len(ran.launches)} launch{'es' if len(ran.launches) > 1 else ''}"
        failed = f"{_command_of(ran.early_end)} {_status_of(ran.early_end, ran.status)}"
        print_message(f"{script} ended after {count}: {failed}. Later launches are missing")
    for line in what_ran(ran, names="--info-dry" in given):
        print_message(line)
    return next((status for status in PRECEDENCE if status in statuses), statuses[0])


def uses_arguments(script: Path) -> bool:
    """Whether the text of a script reads its arguments. Scripts of languages other than a shell are taken to read them."""
    if not (script.suffix in SUFFIXES or SHELLS.intersection(interpreter(str(script)))):
        return True
    return READS_ARGUMENTS.search(script.read_text(errors="replace")) is not None


def _size_of_nodes(launch: Intercepted, options: Sequence[str]) -> list[str]:
    """The number of GPUs of a training whose nodes start different numbers of processes."""
    if launch.processes is None or any(word.startswith("--info-world-size") for word in options):
        return []
    print_message(f"the nodes start {launch.processes} processes together: {launch.processes} GPUs are analyzed")
    return ["--info-world-size", str(launch.processes)]


def _without_launch(script: Path, ran: ScriptRun) -> InputError:
    """The error for a script that ended before any launch: one line with the command that failed."""
    if ran.stopped:
        fault = "does not end" if ran.stopped == "time" else "waits in a loop"
        fault += ", and was ended before it started a training"
        return InputError(str(script), fault, "shorten the script to the part that starts the training")
    remedy = "correct it, or analyze the launch command itself: get-training-info in the place of torchrun"
    if not ran.failures:
        if ran.status == 0:
            return InputError(str(script), "ended without starting a training", "give a script that starts one, with its arguments")
        return InputError(str(script), f"ended with status {ran.status} before it started a training", remedy)
    failure = ran.failures[-1]
    fault = f"ended with status {ran.status} before it started a training: {_command_of(failure)}"
    fault += f" {_status_of(failure)}"
    before = next((other for other in reversed(ran.failures[:-1]) if other.status and other.command != failure.command), None)
    if before is not None and (not failure.status or before.source != failure.source):
        fault += f", after {_command_of(before)} failed with status {before.status}"
    return InputError(str(script), fault, remedy)


def _status_of(failure: Failure, status: int | None = None) -> str:
    """What became of the command. `status`: the exit status of the script, which `exit` gives it."""
    if failure.status:
        return f"failed with status {failure.status}"
    return "ended the script" + (f" with status {status}" if status is not None else "")


def _command_of(failure: Failure) -> str:
    """The command, shortened, and its place."""
    command = failure.command if len(failure.command) <= LONGEST_COMMAND else f"{failure.command[:LONGEST_COMMAND]} …"
    source = failure.source.removeprefix("./")
    return f"{command} (line {failure.line}{f' of {source}' if source else ''})"


def _title(number: int, ran: ScriptRun, script: Path) -> str:
    """Which of the launches it is, and where the script starts it."""
    launch = ran.launches[number - 1]
    source = launch.source.removeprefix("./") or str(script)
    where = source if launch.line is None else f"line {launch.line} of {source}"
    times = f", started {launch.times} times" if launch.times > 1 else ""
    return f"launch {number} of {len(ran.launches)}: {where}{times}"


def _print_heading(number: int, ran: ScriptRun, script: Path, options: Sequence[str]) -> None:
    """The heading of one of several reports. JSON reports on standard output have none."""
    from analyzer.launch.info_options import value_of

    if value_of("--info-json", options) == "-":
        return
    launch = ran.launches[number - 1]
    command = shlex.join(launch.command)
    title = _title(number, ran, script)
    with standard_output() as stream:
        print(("\n" if number > 1 else "") + title[0].upper() + title[1:], file=stream)
        print((command if len(command) <= 100 else f"{command[:100]} …") + "\n", file=stream)


def _numbered(options: Sequence[str], number: int, folder: Path) -> list[str]:
    """The options, with `-2`, `-3` and so on before the suffix of files that belong to a launch. `number` counts from 1.

    An older report or a log that does not exist is left out for all launches but the first. `folder` is the folder in which the
    user gave names of files for the launch, which may have another folder.
    """
    words: list[str] = []
    rest = list(options)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if takes_value(name) and not equals:
            if not rest:
                return [*words, name]
            value = rest.pop(0)
        if name in (*WRITTEN, *COMPARED) and value != "-" and number > 1:
            value = _numbered_file(value, number)
            if name in COMPARED and not os.path.exists(value):
                continue
        if name in OF_LAUNCH and (folder / value).exists():
            value = str(folder / value)
        words += [name, value] if takes_value(name) else [name]
    return words


def _numbered_file(name: str, number: int) -> str:
    """The name with the number before its suffix. A device, such as /dev/null, keeps its name."""
    path = Path(name)
    if path.exists() and not path.is_file():
        return name
    return str(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def _dry(launch: Intercepted, title: str, options: Sequence[str]) -> str:
    """A comment line with the size, the working folder and the environment, and a line with the command."""
    shown = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(launch.environ.items())
        if name.startswith(SHOWN_VARIABLES) and name not in HIDDEN_VARIABLES and "\n" not in value
    ]
    environment = f"; {' '.join(shown)}" if shown else ""
    command = shlex.join(launch.command).replace("\n", " ")
    return f"# {title}; {_size(launch, options)}; in {launch.folder}{environment}\n{command}"


def _size(launch: Intercepted, options: Sequence[str]) -> str:
    """The number of GPUs, if the launch gives it."""
    from analyzer.launch.info_options import read_info_options
    from analyzer.launch.launchers.read_world import read_world
    from analyzer.launch.options.catalogue import load_catalogue
    from analyzer.launch.split_argv import split_argv

    sized = [] if launch.processes is None else ["--info-world-size", str(launch.processes)]
    words = split_argv([*launch.argv, *sized, *options], load_catalogue().newest)
    info = read_info_options(words.info)
    try:
        world = read_world(
            words.launcher_options,
            launch.environ,
            launcher=words.launcher,
            folder=launch.folder,
            size=info.world_size,
            gpus_per_node=info.gpus_per_node,
        )
    except InputError as error:
        return f"number of GPUs unknown ({error.option}: {error.fault})"
    if world is None:
        return "number of GPUs unknown"
    gpus, nodes = ("" if number == 1 else "s" for number in (world.size, world.nodes))
    return f"{world.size} GPU{gpus} ({world.nodes} node{nodes} of {world.gpus_per_node})"
