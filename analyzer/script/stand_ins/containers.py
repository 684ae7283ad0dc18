"""Commands that start a program in a container. The program is started outside of it."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner
from analyzer.script.stand_ins.words import Syntax, last, split_words
from analyzer.script.stand_ins.wrappers import elsewhere, enter, export

DOCKER = Syntax(
    short="aceghlmpuvw",
    flags="detach interactive tty rm privileged init no-healthcheck oom-kill-disable publish-all read-only sig-proxy quiet help "
    "disable-content-trust replace rmi env-host http-proxy no-hosts tls-verify systemd-always",
    attached="",
)
SINGULARITY = Syntax(
    short="BHWSo",
    flags="nv nvccli rocm cleanenv contain containall writable writable-tmpfs no-home no-init no-privs fakeroot userns pid ipc uts "
    "net no-umask allow-setuid keep-privs vm sharens compat disable-cache nohttps passphrase no-eval no-pid no-https sif-fuse "
    "disable-sif-fuse no-setgroups no-tmp-sandbox unsquash oci help ipc vm-err underlay no-compat",
)
ENROOT = Syntax(short="cem", flags="root rw help")
SHIFTER = Syntax(short="iVemw", flags="clearenv help")


def docker(name: str, words: list[str]) -> int:
    """Runs the command of `docker run` and `docker exec`, also behind options of docker itself."""
    words = split_words(words, Syntax(short="cHl", flags="debug tls tlsverify version help"))[1] if words[:1] != ["--"] else words
    if words[:1] in (["container"], ["compose"]):
        words = words[1:]
    if words[:1] not in (["run"], ["exec"]):
        return context.run_behind(name, words) if context.run_all() else context.not_run([name, *words])
    options, command = split_words(words[1:], DOCKER)
    for option, value in options:
        if option in ("e", "env"):
            variable, equals, text = value.partition("=")
            if equals:
                os.environ[variable] = text
    elsewhere()
    enter(last(options, "workdir", "w"))
    entry = last(options, "entrypoint")
    program = [*([entry] if entry else []), *command[1:]]
    return inner.start(program) if program else context.not_run([name, *words])


def singularity(name: str, words: list[str]) -> int:
    """Runs the command of `singularity exec` and `run`, and of apptainer."""
    words = split_words(words, Syntax(flags="debug nocolor quiet silent verbose help version", short="c"))[1]
    if words[:1] not in (["exec"], ["run"]):
        return context.run_behind(name, words) if context.run_all() else context.not_run([name, *words])
    options, command = split_words(words[1:], SINGULARITY)
    export(last(options, "env"))
    elsewhere()
    enter(last(options, "pwd", "cwd"))
    return inner.start(command[1:]) if command[1:] else context.not_run([name, *words])


def enroot(words: list[str]) -> int:
    """Runs the command of `enroot start`."""
    if words[:1] not in (["start"], ["exec"]):
        return context.run_behind("enroot", words) if context.run_all() else context.not_run(["enroot", *words])
    options, command = split_words(words[1:], ENROOT)
    for option, value in options:
        if option in ("e", "env"):
            export(value)
    elsewhere()
    return inner.start(command[1:]) if command[1:] else context.not_run(["enroot", *words])


def shifter(words: list[str]) -> int:
    """Runs the command of shifter."""
    elsewhere()
    return inner.start(split_words(words, SHIFTER)[1])
