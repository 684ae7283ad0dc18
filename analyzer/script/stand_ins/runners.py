"""Managers of environments with a command `run`: conda, uv, poetry, pixi, pdm and others. The command runs without them."""

from __future__ import annotations

import os
import shutil

from analyzer.script.stand_ins import context, inner, launchers, network
from analyzer.script.stand_ins.words import Syntax, last, split_words
from analyzer.script.stand_ins.wrappers import enter

UV = Syntax(
    short="wifPCp",
    flags="all-extras no-dev only-dev dev no-default-groups all-groups module no-editable exact no-env-file isolated active "
    "no-active no-sync sync locked frozen no-locked no-frozen script gui-script all-packages no-project no-workspace "
    "show-resolution no-index upgrade no-upgrade no-sources reinstall no-reinstall force-reinstall compile-bytecode "
    "no-compile-bytecode compile no-compile no-build-isolation build-isolation no-build build no-binary binary "
    "require-build-hashes no-require-build-hashes pre no-cache no-cache-dir refresh no-refresh managed-python "
    "no-managed-python no-python-downloads allow-python-downloads quiet verbose no-color system-certs native-tls "
    "no-native-tls no-system-certs offline no-offline no-progress preview no-preview no-config help version "
    "no-group-all",
)
"""Options of uv 0.13 and of earlier releases; those with a value take the next word."""
CONDA = Syntax(
    short="nprae",
    flags="no-capture-output live-stream verbose dev debug-wrapper-scripts detach clean-env quiet no-banner help no-rc no-env "
    "json yes",
)
OTHERS = Syntax(
    short="CPep",
    flags="no-capture-output verbose quiet help no-interaction no-ansi ansi no-plugins no-cache site-packages "
    "no-site-packages recreate locked frozen no-install as-is clean-env skip-deps no-lockfile-update all no-progress "
    "force-activate dry-run executable x no-color",
)
SYNTAX = {"conda": CONDA, "mamba": CONDA, "micromamba": CONDA, "uv": UV, "uvx": UV}
"""By name; the others have OTHERS."""
READING = {
    "conda": frozenset("info list env shell.bash shell.posix shell config search --version -V activate deactivate".split()),
    "uv": frozenset({"--version", "-V", "version", "tree", "help"}),
    "pixi": frozenset({"--version", "-V", "info", "list", "shell-hook"}),
    "poetry": frozenset({"--version", "-V", "env", "show", "version", "check"}),
}
"""Subcommands that run as they are."""


def runner(name: str, words: list[str]) -> int:
    """Starts the command of `conda run`, `uv run` and the like. Subcommands that install are not run."""
    syntax = SYNTAX.get(name, OTHERS)
    options, rest = split_words(words, syntax)
    if name == "uvx" or (name == "uv" and rest[:2] == ["tool", "run"]):
        command = rest if name == "uvx" else split_words(rest[2:], syntax)[1]
        return _start(name, words, options, command) if launchers.starts_launcher(command) else _refuse(name, words)
    if rest[:1] in (["run"], ["r"]):
        more, command = split_words(rest[1:], syntax)
        return _start(name, words, [*options, *more], command)
    kind = "conda" if name in ("mamba", "micromamba") else name
    reads = not words or words[0] in READING.get(kind, ("--version",))
    if reads and not (kind == "conda" and words[:1] == ["env"] and words[1:2] not in (["list"], ["export"])):
        return 0 if context.behind(name) is None else context.run_behind(name, words)
    return _refuse(name, words)


def _start(name: str, words: list[str], options: list[tuple[str, str]], command: list[str]) -> int:
    """Starts the command if it is a program here, and not the name of a task, or an address."""
    if not command:
        return _refuse(name, words)
    given = {option for option, _ in options}
    enter(last(options, "directory", "cwd"))
    if name in ("uv", "uvx") and given & {"m", "module"}:
        command = ["python", "-m", *command]
    elif name in ("uv", "uvx") and (given & {"s", "script", "gui-script"} or command[0].endswith((".py", ".pyw"))):
        command = ["python", *command]
    elif name == "hatch" and ":" in command[0] and "/" not in command[0]:
        command = [command[0].partition(":")[2], *command[1:]]
    if len(command) == 1 and " " in command[0]:
        return inner.start_text(command[0])  # as pixi does
    found = os.path.basename(command[0]) in inner.SHELLS or context.has_stand_in(os.path.basename(command[0]))
    if not found and shutil.which(command[0]) is None:
        return _refuse(name, words)
    return inner.start(command)


def _refuse(name: str, words: list[str]) -> int:
    return context.run_behind(name, words) if context.run_all() else network.not_run([name, *words])
