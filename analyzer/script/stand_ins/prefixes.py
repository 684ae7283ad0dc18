"""Commands that start another command with a changed environment, priority or time limit."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner, launchers
from analyzer.script.stand_ins.words import Syntax, last, split_words
from analyzer.script.stand_ins.wrappers import enter, set_assignments

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
}
"""Commands that are left out, because what they set depends on the machine."""
POSITIONAL = {"timeout": 1, "taskset": 1, "chrt": 1}
"""Number of words between the options and the command."""
SUDO = Syntax(
    short="CDghprTtUu",
    flags="askpass background edit preserve-env set-home help login remove-timestamp non-interactive shell stdin",
)


FLOCK = Syntax(short="wE", flags="shared exclusive nonblock unlock close no-fork verbose")
PARALLEL = Syntax(
    short="jPaNnLICSsld",
    flags="line-buffer lb ungroup group keep-order bar progress eta dry-run verbose tag nonall onall no-notice will-cite "
    "citation xargs null pipe no-run-if-empty resume resume-failed shuf plus link xapply quote trim tty files fifo "
    "cleanup linebuffer",
)
SOURCES = (":::", ":::+", "::::", "::::+")
"""Words of GNU parallel before arguments, or before files with arguments."""
REPLACED = ("{}", "{1}", "{.}", "{/}")
"""What GNU parallel replaces by the argument."""


def prefix(name: str, words: list[str]) -> int:
    """Does what stands for the command `name`."""
    own = {"env": env, "sudo": sudo, "su": su, "flock": flock, "parallel": parallel}
    if name in own:
        return own[name](words)
    return kept(name, words) if name in KEPT else dropped(name, words)


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
    if name in ("taskset", "chrt", "ionice") and last(options, "p", "pid") is not None:
        return 0
    if name == "numactl" and not command:
        return context.run_behind(name, words)
    if name == "setsid" and last(options, "f", "fork") is not None and os.fork() != 0:
        return 0  # setsid returns at once, and its child starts the command
    return inner.start(command[POSITIONAL.get(name, 0) :])


def sudo(words: list[str]) -> int:
    """Starts a command with a launcher, without other rights. Any other command is not run."""
    options, command = split_words(words, SUDO)
    if context.run_all():
        return context.run_behind("sudo", [*words[: len(words) - len(command)], *(inner.resolved(command) if command else [])])
    command = set_assignments(command)
    enter(last(options, "D", "chdir"))
    if not command and {"s", "i", "shell", "login"} & {name for name, _ in options}:
        command = ["bash"]
    return inner.start(command) if launchers.runs_here(command) else context.not_run(["sudo", *words])


def su(words: list[str]) -> int:
    """Starts the command of `su -c`, or of a script after the user, if it has a launcher."""
    text = None
    for position, word in enumerate(words):
        if word in ("-c", "--command", "-lc") and position + 1 < len(words):
            text = words[position + 1]
        elif word.startswith("--command="):
            text = word.partition("=")[2]
    if text is None:
        rest = [word for word in words if not word.startswith("-")][1:]
        text = context.quoted(["bash", *rest]) if rest else None
    if text is None or not launchers.contains_launcher(text):
        return launchers.refuse(["su", *words])
    return inner.start_text(text)


def flock(words: list[str]) -> int:
    """Starts the command without a lock: no other process changes what this one sees."""
    if context.run_all():
        return context.run_behind("flock", words)
    command = split_words(words, FLOCK)[1][1:]
    if command[:1] in (["-c"], ["--command"]):
        return inner.start_text(" ".join(command[1:2]))
    return inner.start(command)


def parallel(words: list[str]) -> int:
    """Starts the command of GNU parallel once, for the first argument, if it has a launcher."""
    options, rest = split_words(words, PARALLEL)
    position = next((index for index, word in enumerate(rest) if word in SOURCES), len(rest))
    command, sources = rest[:position], rest[position:]
    file = last(options, "a", "arg-file") or next(iter(sources[1:]), None) if sources[:1] != [":::"] else None
    argument = next(iter(sources[1:]), "") if sources[:1] == [":::"] else _first_line(file)
    text = " ".join(command)
    if not command:
        text = argument
    elif "{" in text:
        for name in REPLACED:
            text = text.replace(name, context.quoted([argument]))
    else:
        text = f"{text} {context.quoted([argument])}"
    return inner.start_text(text) if launchers.contains_launcher(text) else launchers.refuse(["parallel", *words])


def _first_line(file: str | None) -> str:
    """The first line of a file, or of standard input."""
    try:
        with open(0 if file is None else file, encoding="utf-8", errors="replace", closefd=file is not None) as text:
            return text.readline().rstrip("\n")
    except OSError:
        return ""
