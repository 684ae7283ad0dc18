"""Turns a new child process into a launch script in isolation. Nothing of the analysis runs in it.

The child sends lines through a pipe: `started`, with the folders that are read-only, or `refused`, with the reason, and, from
namespaces, `status`, with the exit status of the script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from analyzer.script.isolation import system_calls as call
from analyzer.script.isolation.landlock import restrict_writing
from analyzer.script.isolation.mounts import FileSystem, read_mounts
from analyzer.script.isolation.users import map_users
from analyzer.signals import interrupt_blocking_calls

HIGHEST_HANDLE = 65536
"""Open files above this number are left to the script, as a shell would."""
REFUSED = 121
"""Exit status if the script was not started."""
WORKSPACE = "root"
"""Name of the folder, in that of the run, at which the new root is built."""


class Isolation(StrEnum):
    """How a script is kept from changing anything."""

    NAMESPACES = "namespaces"
    """Linux namespaces: a copy of the file system, own processes, no network."""
    PRELOAD = "preload"
    """The preloaded library: a private copy of what is written, no signals to other processes, no connections. Landlock, where the
    kernel has it, refuses what passes the library."""
    NONE = "none"
    """The script runs as it is (--info-run-all)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started: a command with its environment and folder. `place` is the folder of the run."""

    isolation: Isolation
    command: Sequence[str]
    environ: dict[str, str]
    folder: str
    place: str


def run_child(job: Job, messages: int, output: int) -> None:
    """Starts the script, in a child process. `messages` and `output` are pipes to the parent. Does not return."""
    status = REFUSED
    try:
        _prepare(messages, output)
        if job.isolation is Isolation.NAMESPACES:
            status = _in_namespaces(job, messages)
        elif job.isolation is Isolation.PRELOAD:
            status = _under_supervision(job, messages)
        else:
            _become(job)
    except OSError as error:
        _send(messages, "refused", f"{error.strerror or error} ({error.filename})")
    finally:
        os._exit(status)


def _send(messages: int, name: str, *words: str) -> None:
    """Sends one line, whose words are separated by tabs. A parent that has ended does not receive it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(messages, "\t".join([name, *(word.replace("\n", " ").replace("\t", " ") for word in words)]).encode() + b"\n")


def _prepare(messages: int, output: int) -> None:
    """A session without a terminal, no input, both outputs to a pipe, and no other open file or signal handler.

    The script does not get the real standard error: it could truncate that file, or change the settings of a terminal.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, messages)
    os.closerange(messages + 1, HIGHEST_HANDLE)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)


def _become(job: Job) -> None:
    """Replaces this process by the script. Raises OSError."""
    os.chdir(job.folder)
    if job.isolation is not Isolation.NONE:
        call.give_up_rights()
    if job.isolation is Isolation.PRELOAD:
        restrict_writing(job.place)
    os.execve(job.command[0], list(job.command), job.environ)


def _in_namespaces(job: Job, messages: int) -> int:
    """Starts the first process of new namespaces, and waits for it."""
    kinds = (
        call.CLONE_NEWUSER | call.CLONE_NEWNS | call.CLONE_NEWPID | call.CLONE_NEWIPC | call.CLONE_NEWNET | call.CLONE_NEWUTS
    )  # fmt: skip
    call.end_with_parent(signal.SIGKILL)
    map_users(lambda: call.unshare(kinds))
    child = os.fork()
    if child == 0:
        call.end_with_parent(signal.SIGKILL)
        return _first_process(job, messages)
    os.close(messages)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _first_process(job: Job, messages: int) -> int:
    """Builds the file system, starts the script, and waits until no process is left."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = read_mounts(file.read())
    files = FileSystem(os.path.join(job.place, WORKSPACE), mounts)
    files.build(job.place)
    call.start_loopback()
    call.pivot_root(files.root)
    _send(messages, "started", *files.read_only)
    return _run(job, messages)


def _under_supervision(job: Job, messages: int) -> int:
    """Starts the script as a descendant that cannot leave: orphans become children of this process, which ends them all.

    SIGTERM, which the end of the parent sends, ends the run.
    """
    call.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _end_run())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    interrupt_blocking_calls()
    call.end_with_parent(signal.SIGTERM)
    _send(messages, "started")
    return _run(job, messages)


def _run(job: Job, messages: int) -> int:
    """Starts the script and waits until no process is left."""
    script = os.fork()
    if script == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        _become(job)
    while True:
        try:
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return 0
        if ended == script:
            _send(messages, "status", str(os.waitstatus_to_exitcode(status)))


def _end_run() -> None:
    """Ends all descendants of this process, also those that are started meanwhile, and this process."""
    while end_descendants(os.getpid()):
        time.sleep(0.005)
    os._exit(0)


def end_descendants(top: int) -> bool:
    """Sends SIGKILL to every descendant of the process `top`. Returns whether there was one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    found: set[int] = set()
    while more := {process for process, parent in parents.items() if parent in (top, *found)} - found:
        found |= more
    for process in found:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return bool(found)
