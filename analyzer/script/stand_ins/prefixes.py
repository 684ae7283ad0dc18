"""Commands that start another command with a changed environment, priority or time limit."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner
from analyzer.script.stand_ins.words import Syntax, last, split_words
from analyzer.script.stand_ins.wrappers import set_assignments

KEPT = {
    "nohup": Syntax(),
    "timeout": Syntax(short="ks", flags="foreground preserve-status verbose"),
    "stdbuf": Syntax(short="ioe"),
    "time": Syntax(short="fo", flags="append portability verbose quiet"),
    "xargs": Syntax(
        short="EILPadns",
        flags="null open-tty interactive no-run-if-empty verbose exit show-limits",
        attached="replace eof max-lines",
    ),
}
"""Commands that run as usual, with a stand-in as the command that they start."""
DROPPED = {
    "numactl": Syntax(
        short="CNPilmpxS", flags="all balancing localalloc show hardware preferred-many-all", attached="weighted-interleave"
    ),
    "taskset": Syntax(flags="all-tasks pid cpu-list"),
    "nice": Syntax(short="n"),
    "ionice": Syntax(short="cnpPu", flags="ignore"),
    "chrt": Syntax(short="TPD"),
    "setsid": Syntax(flags="ctty fork wait"),
    "strace": Syntax(short="eosxapIOSUPEbX"),
    "unbuffer": Syntax(),
    "catchsegv": Syntax(),
    "dumb-init": Syntax(short="r", flags="single-child verbose"),
    "tini": Syntax(short="pe"),
    "su": Syntax(short="cgGsw", flags="login preserve-environment fast pty"),
}
"""Commands that are left out, because what they set depends on the machine."""
POSITIONAL = {"timeout": 1, "taskset": 1, "chrt": 1}
"""Number of words between the options and the command."""
RUNNERS = {
    "conda": Syntax(short="np", flags="no-capture-output live-stream verbose dev debug-wrapper-scripts"),
    "uv": Syntax(
        short="pUCf", flags="no-sync frozen locked isolated active no-project all-extras verbose quiet no-dev offline module exact"
    ),
}
"""Environment managers with a command `run`."""
READING = {
    "conda": frozenset(
        {"info", "list", "env", "shell.bash", "shell.posix", "config", "search", "--version", "-V", "activate", "deactivate"}
    ),
    "uv": frozenset({"--version", "version", "tree"}),
}
SUDO = Syntax(
    short="CDghprTtUu",
    flags="askpass background edit preserve-env set-home help login remove-timestamp non-interactive shell stdin",
)


def env(words: list[str]) -> int:
    """Sets and removes variables, and starts the command. A program starts with the stand-ins even after `env -i`."""
    position = 0
    split: list[str] = []
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        position += 1
        if word in ("-i", "-", "--ignore-environment"):
            for name in [
                name for name in os.environ if name not in ("PATH", "BASH_ENV", "HOME") and name not in context.OWN_VARIABLES
            ]:
                del os.environ[name]
        elif word in ("-u", "--unset", "-C", "--chdir"):
            value = words[position] if position < len(words) else ""
            position += 1
            _unset_or_enter(word, value)
        elif word.startswith(("--unset=", "--chdir=")):
            _unset_or_enter(*word.split("=", 1))
        elif word in ("-S", "--split-string"):
            import shlex

            split = shlex.split(words[position]) if position < len(words) else []
            position += 1
        elif word == "--":
            break
        elif word not in ("-v", "--debug"):
            return context.run_behind("env", words)
    command = set_assignments([*split, *words[position:]])
    if not command:
        return context.run_behind("env", words)
    return inner.start(command)


def _unset_or_enter(option: str, value: str) -> None:
    if option in ("-u", "--unset"):
        os.environ.pop(value, None)
    elif os.path.isdir(value):
        os.chdir(value)


def kept(name: str, words: list[str]) -> int:
    """Runs the program itself, which starts the stand-in of its command."""
    command = split_words(words, KEPT[name])[1][POSITIONAL.get(name, 0) :]
    if not command:
        return context.run_behind(name, words)
    before = words[: len(words) - len(command)]
    if context.behind(name) is None:
        return inner.start(command)
    return context.run_behind(name, [*before, *inner.resolved(command)])


def dropped(name: str, words: list[str]) -> int:
    """Starts the command without the program before it."""
    options, command = split_words(words, DROPPED[name])
    if name == "su":
        text = last(options, "c", "command")
        return context.not_run([name, *words]) if text is None else inner.start_text(text)
    if name in ("taskset", "chrt", "ionice") and last(options, "p", "pid") is not None:
        return 0
    if name == "numactl" and not command:
        return context.run_behind(name, words)
    return inner.start(command[POSITIONAL.get(name, 0) :])


def runner(name: str, words: list[str]) -> int:
    """Starts the command of `conda run` or `uv run`. Subcommands that install are not run."""
    kind = "uv" if name in ("uv", "poetry", "pixi", "pdm", "rye", "hatch") else "conda"
    if words[:1] == ["run"]:
        return inner.start(split_words(words[1:], RUNNERS[kind])[1])
    if kind == "conda" and words[:1] == ["env"] and words[1:2] != ["list"]:
        return _installer(name, words)
    if not words or words[0] in READING[kind]:
        return 0 if context.behind(name) is None else context.run_behind(name, words)
    return _installer(name, words)


def _installer(name: str, words: list[str]) -> int:
    return context.run_behind(name, words) if context.run_all() else context.not_run([name, *words])


def sudo(words: list[str]) -> int:
    """Starts a launcher without other rights. Any other command is not run."""
    if context.run_all():
        command = split_words(words, SUDO)[1]
        return context.run_behind("sudo", [*words[: len(words) - len(command)], *(inner.resolved(command) if command else [])])
    command = set_assignments(split_words(words, SUDO)[1])
    name = os.path.basename(command[0]) if command else ""
    if name in inner.SHELLS or context.has_stand_in(name) or inner.is_shell_script(command[0] if command else ""):
        return inner.start(command)
    return context.not_run(["sudo", *words])
