"""Programs that start another program: schedulers, MPI, containers, profilers, and commands such as env and timeout."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner, launchers, slurm
from analyzer.script.stand_ins.words import Syntax, last, split_words

NSYS = Syntax(short="beFfopstwxyidcnq", flags="help version")
RAY_JOB = Syntax(flags="no-wait verbose v help", attached="log-style")


def srun(words: list[str]) -> int:
    """Runs the command as the first task of a step."""
    options, command = split_words(words, slurm.SYNTAX)
    os.environ.update(slurm.step_variables(options, dict(os.environ)))
    export(last(options, "export"))
    enter(last(options, "chdir", "D") or last(options, "container-workdir"))
    if last(options, "container-image", "container-name") is not None and command:
        return launchers.start_elsewhere("srun --container-image", command)
    return inner.start(command)


def salloc(words: list[str]) -> int:
    """Runs the command inside a new allocation."""
    options, command = split_words(words, slurm.SYNTAX)
    os.environ.update(slurm.batch_variables(options, script="interactive", folder=os.getcwd()))
    return inner.start(command)


def sbatch(words: list[str]) -> int:
    """Runs the batch script, or the command of `--wrap`, where the job would be submitted."""
    options, command = split_words(words, slurm.SYNTAX)
    wrapped = last(options, "wrap")
    os.write(1, b"1\n" if last(options, "parsable") is not None else b"Submitted batch job 1\n")
    os.dup2(2, 1)
    if wrapped is None and not command:
        return _standard_input(options)
    if wrapped is None and not os.path.isfile(command[0]):
        context.say(f"sbatch: there is no file {command[0]}")
        return 1
    if wrapped is None and not _is_new_batch(command[0]):
        return context.not_run(["sbatch", *words])
    header = slurm.read_header(command[0]) if wrapped is None else []
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ.update(
        slurm.batch_variables([*header, *options] or [("nodes", "1")], script=(command or ["wrap"])[0], folder=os.getcwd())
    )
    export(last([*header, *options], "export"))
    enter(last([*header, *options], "chdir", "D"))
    os.environ[context.LINE_VARIABLE] = ""
    return inner.start_text(wrapped) if wrapped is not None else inner.start_shell(command)


def _is_new_batch(path: str) -> bool:
    """Notes a batch script. False if it runs already: a script that submits itself again, to continue the training."""
    scripts = os.environ.get(context.BATCH_VARIABLE, "").split(":")
    own = os.path.realpath(path)
    os.environ[context.BATCH_VARIABLE] = ":".join([*scripts, own])
    return own not in scripts


def _standard_input(options: list[tuple[str, str]]) -> int:
    """Runs the batch script that sbatch reads from standard input."""
    import sys

    path = os.path.join(context.folder(), f"batch{os.getpid()}.sh")
    with open(path, "w", encoding="utf-8") as file:
        file.write(sys.stdin.read())
    os.environ.update(slurm.batch_variables([*slurm.read_header(path), *options], script="sbatch", folder=os.getcwd()))
    return inner.start_shell([path])


def mpirun(words: list[str]) -> int:
    """Runs the command as the first process of an MPI job (Open MPI 5, MPICH 4 and Intel MPI)."""
    from analyzer.script.stand_ins import mpi

    options, command = mpi.split(words)
    os.environ.update(mpi.variables(options, command))
    if ":" in command:
        command = command[: command.index(":")]
    enter(last(options, "wdir", "wd"))
    return inner.start(command)


def nsys(words: list[str]) -> int:
    """Runs the command that `nsys profile` or `nsys launch` profiles. Other subcommands do nothing."""
    if words[:1] not in (["profile"], ["launch"]):
        return context.not_run(["nsys", *words])
    return inner.start(_command_after_options(words[1:], NSYS))


def profiler(name: str, words: list[str]) -> int:
    """Runs the command that a profiler such as ncu or rocprof starts."""
    command = _command_after_options(words, Syntax(flags="help version", short="ocsktfpi"))
    return inner.start(command) if command else context.not_run([name, *words])


def _command_after_options(words: list[str], syntax: Syntax) -> list[str]:
    """The command after options, of which some may be unknown: a program that has a stand-in is never the value of an option."""
    command = split_words(words, syntax)[1]
    for position, word in enumerate(words[: len(words) - len(command)]):
        before = words[position - 1] if position else ""
        if before.startswith("-") and "=" not in before and _starts_programs(word):
            return words[position:]
    return command


def _starts_programs(word: str) -> bool:
    name = os.path.basename(word)
    return name in inner.SHELLS or (
        context.has_stand_in(name) and name in ("python", "python3", "torchrun", "deepspeed", "accelerate")
    )


def ray(words: list[str]) -> int:
    """Runs the command of `ray job submit`."""
    if words[:2] != ["job", "submit"]:
        from analyzer.script.stand_ins import cluster

        return cluster.ray(words)
    options, command = split_words(words[2:], RAY_JOB)
    enter(last(options, "working-dir"))
    return inner.start(command) if len(command) != 1 else inner.start_text(command[0])


def export(value: str | None) -> None:
    """Sets the variables of `--export=ALL,NAME=VALUE`."""
    for each in (value or "").split(","):
        name, equals, text = each.partition("=")
        if equals and name.isidentifier():
            os.environ[name] = text


def enter(folder: str | None) -> None:
    """Changes the working folder if it exists here."""
    if folder and os.path.isdir(folder):
        os.chdir(folder)


def set_assignments(words: list[str]) -> list[str]:
    """Sets leading NAME=VALUE words, and returns the rest."""
    position = 0
    while position < len(words):
        name, equals, value = words[position].partition("=")
        if not equals or not name.replace("_", "a").isalnum():
            break
        os.environ[name] = value
        position += 1
    return words[position:]
