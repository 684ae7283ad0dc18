"""Commands that start a program in a container. A program with a launcher is started outside of it; no other is."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import launchers
from analyzer.script.stand_ins.words import Syntax, last, split_words
from analyzer.script.stand_ins.wrappers import enter, export


class Container:
    """How a program for containers is called: its own options, its commands that run a program, and the options of these.

    `images`: number of words between the options and the program, such as the image. `separator`: the word before the program.
    """

    def __init__(
        self, commands: str, syntax: Syntax, *, own: Syntax | None = None, images: int = 1, separator: str = "", groups: str = ""
    ) -> None:
        self.commands = commands.split()
        self.syntax = syntax
        self.own = own or Syntax(short="cHl", flags="debug tls tlsverify version help nocolor quiet silent verbose")
        self.images = images
        self.separator = separator
        self.groups = groups.split()


DOCKER = Container(
    "run exec create",
    Syntax(
        short="aceghlmpuvw",
        flags="detach interactive tty rm privileged init no-healthcheck oom-kill-disable publish-all read-only sig-proxy "
        "quiet help disable-content-trust replace rmi env-host http-proxy no-hosts tls-verify systemd-always "
        "service-ports no-deps use-aliases build no-TTY remove-orphans quiet-pull no-tty gpu mpi",
        attached="",
    ),
    own=Syntax(short="cHlfp", flags="debug tls tlsverify version help remote compatibility all-resources verbose"),
    groups="container compose",
)
SINGULARITY = Container(
    "exec run",
    Syntax(
        short="BHWSo",
        flags="nv nvccli rocm cleanenv contain containall writable writable-tmpfs no-home no-init no-privs fakeroot userns "
        "pid ipc uts net no-umask allow-setuid keep-privs vm sharens compat disable-cache nohttps passphrase no-eval "
        "no-pid no-https sif-fuse disable-sif-fuse no-setgroups no-tmp-sandbox unsquash oci help ipc vm-err underlay "
        "no-compat",
    ),
    own=Syntax(flags="debug nocolor quiet silent verbose help version", short="c"),
)
CONTAINERS = {
    "singularity": SINGULARITY,
    "apptainer": SINGULARITY,
    "enroot": Container("start exec", Syntax(short="cem", flags="root rw help")),
    "shifter": Container("", Syntax(short="iVemw", flags="clearenv help"), images=0),
    "ch-run": Container(
        "",
        Syntax(
            short="bcgmu", attached="set-env unset-env", flags="join no-home no-passwd write write-fake private-tmp unsafe verbose"
        ),
    ),
    "sarus": Container("run", Syntax(short="evwt", flags="mpi glibc ssh tty centralized-repository pidnamespace entrypoint-none")),
    "udocker": Container(
        "run", Syntax(short="evwu", attached="", flags="rm nobanner hostauth containerauth hostenv novol nosysdirs")
    ),
    "kubectl": Container("exec", Syntax(short="cnfs", flags="stdin tty quiet"), own=Syntax(short="ns"), images=1, separator="--"),
    "lxc": Container("exec", Syntax(short="TtnN"), separator="--"),
    "crictl": Container("exec", Syntax(short="r", flags="tty interactive sync privileged")),
}
"""By name; all others are called as docker is."""


def container(name: str, words: list[str]) -> int:
    """Runs the command of `docker run` and the like if it contains a launcher."""
    form = CONTAINERS.get(name, DOCKER)
    whole = [name, *words]
    rest = words
    kind = name
    if form.commands:
        rest = split_words(words, form.own)[1]
        if rest[:1] and rest[0] in form.groups:
            rest = split_words(rest[1:], form.own)[1]
        if rest[:1] == [] or rest[0] not in form.commands:
            return launchers.refuse(whole)
        kind = f"{name} {rest[0]}"
        rest = rest[1:]
    options, command = split_words(rest, form.syntax)
    command = _program(form, options, rest, command)
    folder = os.getcwd()
    enter(last(options, "workdir", "w", "pwd", "cwd", "cd"))
    if not launchers.runs_here(command):
        os.chdir(folder)
        return launchers.refuse(whole)
    for option, value in options:
        if option in ("e", "env", "set-env") and form is not SINGULARITY:
            variable, equals, text = value.partition("=")
            if equals and variable.isidentifier():
                os.environ[variable] = text
    if form is SINGULARITY:
        export(last(options, "env"))
    return launchers.start_elsewhere(kind, command)


def _program(form: Container, options: list[tuple[str, str]], rest: list[str], command: list[str]) -> list[str]:
    """The program in the container with its arguments."""
    if form.separator and form.separator in rest:
        return rest[rest.index(form.separator) + 1 :]
    entry = last(options, "entrypoint")
    command = command[form.images :]
    command = command[1:] if command[:1] == ["--"] else command
    return [*([entry] if entry else []), *command]
