"""The names of launchers, and whether a command of a shell starts one."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner

PYTHONS = ("python", "python3", "python2", *(f"python3.{minor}" for minor in range(8, 16)))
LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "megatron", "swift", "llamafactory-cli")
MPI = (
    "mpirun", "mpirun.openmpi", "mpirun.mpich", "mpirun_rsh", "mpiexec", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra",
    "orterun", "prterun", "horovodrun", "aprun",
)  # fmt: skip
BATCH = ("srun", "salloc", "sbatch", "qsub")
PROFILERS = ("nsys", "ncu", "rocprof", "rocprofv3", "rocprof-sys-run")
CONTAINERS = (
    "docker", "nvidia-docker", "podman", "podman-hpc", "nerdctl", "docker-compose", "singularity", "apptainer", "enroot", "shifter",
    "ch-run", "sarus", "udocker", "kubectl", "lxc", "crictl",
)  # fmt: skip
PREFIXES = (
    "env", "nohup", "timeout", "stdbuf", "time", "xargs", "numactl", "taskset", "nice", "ionice", "chrt", "setsid", "strace",
    "unbuffer", "catchsegv", "dumb-init", "tini", "su", "sudo", "flock", "parallel",
)  # fmt: skip
RUNNERS = ("conda", "mamba", "micromamba", "uv", "uvx", "poetry", "pixi", "pdm", "rye", "hatch", "pipenv")
REMOTE = ("ssh", "rsh", "pdsh", "clush", "pssh", "parallel-ssh")
TERMINALS = ("tmux", "screen")
WRAPPERS = frozenset((*PROFILERS, *CONTAINERS, *PREFIXES, *RUNNERS, *REMOTE, *TERMINALS, "eval", "exec", "command", "builtin"))
"""Commands that may start any of the words after them, or a text among these."""
TRAINING_COMMANDS = {
    "accelerate": frozenset({"launch"}),
    "megatron": frozenset({"sft", "pt", "rlhf", "train"}),
    "swift": frozenset({"sft", "pt", "rlhf", "train"}),
    "llamafactory-cli": frozenset({"sft", "pt", "rlhf", "train"}),
}
"""The first words after a launcher that has other uses as well."""
KEYWORDS = frozenset("if then elif else do while until time ! { } function".split())
SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job")
PUNCTUATION = ";&|()<>\n"
DEEPEST = 5
"""Texts inside each other that are read."""
PRINTS = frozenset({"nvidia-smi", "hostname", "scontrol", "ip"})
"""Commands that print something about a machine. Their stand-ins change nothing."""
MENTION = (
    r"(?<![\w.-])(?:torchrun|deepspeed|srun|sbatch|salloc|qsub|mpirun|mpiexec|orterun|horovodrun|accelerate\s+launch"
    r"|ray\s+job\s+submit|torch\.distributed\.(?:run|launch|elastic)|accelerate\.commands\.launch"
    r"|python[\d.]*\s+(?:-\S+\s+)*\S*train\S*|\S*train\w*\.(?:py|sh)|(?:ba|da|z)?sh\s+\S+\.(?:sh|bash|slurm|sbatch))(?![\w-])"
)
"""A launcher in the text of a script."""


def runs_here(command: list[str]) -> bool:
    """Whether the command of a container or of another machine starts a launcher, or only prints something about a machine.

    The text that a shell would read from standard input is read, and kept for it.
    """
    if not command:
        return False
    name = os.path.basename(command[0])
    if name in inner.SHELLS and inner.script_of(command[1:]) is None:
        return contains_launcher(_input())
    return name in PRINTS or starts_launcher(command)


def refuse(words: list[str]) -> int:
    """Does not run a command without a launcher, except with --info-run-all."""
    return context.run_behind(words[0], words[1:]) if context.run_all() else context.not_run(words)


def start_elsewhere(kind: str, command: list[str]) -> int:
    """Starts the command of a container or of another machine on this one. Says so once for each `kind`, such as docker run."""
    os.environ[context.ELSEWHERE_VARIABLE] = "1"
    try:
        os.close(os.open(os.path.join(context.folder(), f"said {kind}".replace("/", " ")), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        context.say(f"the command in {kind} runs here: its paths are those of this machine")
    except FileExistsError:
        pass
    return inner.start(command)


def contains_launcher(text: str, depth: int = 0) -> bool:
    """Whether a text of a shell starts a launcher. In case of doubt, such as a variable for the program, the answer is yes."""
    if depth > DEEPEST:
        return False
    try:
        commands = _commands(text)
    except ValueError:
        return mentions_launcher(text)
    return any(
        _starts(words, depth) or (bool(words) and words[0].startswith("$") and mentions_launcher(text))
        for words in map(_program, commands)
    )


def starts_launcher(words: list[str]) -> bool:
    """Whether one command, given by its words, starts a launcher."""
    return _starts(_program(words), 0)


def mentions_launcher(text: str) -> bool:
    """Whether a line of a script or of a Python file names a launcher, outside of comments."""
    import re

    return any(re.search(MENTION, line) for line in text.splitlines() if not line.lstrip().startswith("#"))


def _commands(text: str) -> list[list[str]]:
    """The words of each command in a text. Raises ValueError for quotes without an end."""
    import shlex

    lexer = shlex.shlex(text.replace("\\\n", " ").replace("`", ";"), posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    comment = redirected = False
    for token in lexer:
        if token and set(token) <= set(PUNCTUATION):
            comment = comment and "\n" not in token
            redirected = token.strip("&") in ("<", ">", ">>", "<<", "<<<", "<>", ">|")
            if not redirected:
                commands.append([])
        elif redirected:
            redirected = False
        else:
            comment = comment or token.startswith("#")
            if not comment:
                commands[-1].append(token)
    return commands


def _program(words: list[str]) -> list[str]:
    """The words from the program on, after keywords and assignments."""
    position = 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if words[position] not in KEYWORDS and not (equals and name.rstrip("+").isidentifier()):
            break
        position += 1
    return words[position:]


def _starts(words: list[str], depth: int) -> bool:
    """Whether the program `words[0]` is a launcher, or a wrapper with a launcher or with a text that has one."""
    if not words:
        return False
    if os.path.basename(words[0]) not in WRAPPERS:
        return _is_one(words, depth)
    return any(_is_one(words[position:], depth) for position in range(1, len(words))) or any(
        contains_launcher(word, depth + 1) for word in words[1:] if not word.isidentifier() and set(word) & set(" \n;")
    )


def _is_one(words: list[str], depth: int) -> bool:
    """Whether the first word is a launcher with its arguments, a shell or a script that starts one, or a script that trains."""
    from analyzer.script.stand_ins.python_command import trains

    path, rest = words[0], words[1:]
    name = os.path.basename(path)
    if name in (*BATCH, *MPI) or (name in LAUNCHERS and name not in TRAINING_COMMANDS):
        return True
    if name in TRAINING_COMMANDS:
        return bool(rest) and rest[0] in TRAINING_COMMANDS[name]
    if name == "ray":
        return rest[:2] == ["job", "submit"]
    if name.startswith("python") and (name in PYTHONS or name[6:].replace(".", "").isdecimal()):
        return _python_starts(rest)
    if name in inner.SHELLS:
        script = inner.script_of(rest)
        text = inner.text_of(rest)
        return contains_launcher(text, depth + 1) if text is not None else script is not None and _file_starts(script, default=True)
    if name in ("source", "."):
        return bool(rest) and _file_starts(rest[0], default=False)
    if name.endswith(SCRIPT_ENDINGS) and path != name:
        return _file_starts(path, default=True)
    if name.endswith(".py"):
        return trains(name, rest)
    return inner.is_shell_script(path) and _file_starts(path, default=True)


def _python_starts(rest: list[str]) -> bool:
    """Whether Python with these words trains, or runs a script or a code that names a launcher."""
    from analyzer.script.stand_ins.python_command import launch_of, read_python

    if launch_of(rest) is not None:
        return True
    command = read_python(rest)
    if command.script is not None:
        return _file_starts(command.script, default=False)
    return command.module is None and mentions_launcher(" ".join(rest))


def _file_starts(path: str, *, default: bool) -> bool:
    """Whether the text of a file names a launcher; `default` if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return mentions_launcher(file.read(1 << 20))
    except (OSError, ValueError):
        return default


def _input() -> str:
    """The text on standard input, which the next program reads again."""
    import sys

    try:
        text = sys.stdin.read()
    except (OSError, ValueError):
        return ""
    path = os.path.join(context.folder(), f"input{os.getpid()}")
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    handle = os.open(path, os.O_RDONLY)
    os.dup2(handle, 0)
    os.close(handle)
    return text
