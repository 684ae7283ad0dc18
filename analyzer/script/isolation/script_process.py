"""The process of a launch script, from outside: it is started in isolation, watched and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from analyzer.script.isolation.start import WORKSPACE, Isolation, Job, end_descendants, run_child
from analyzer.script.stand_ins import context

LONGEST_START: Final = 30.0
"""Seconds after which namespaces that are not ready are given up."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The isolation is not available here, and why."""

    reason: str


class ScriptProcess:
    """A script that was started in the folder of the run `place`. `read_only`: the folders in which it cannot write."""

    def __init__(self, process: int, messages: int, output: int, place: Path, isolation: Isolation) -> None:
        self.isolation = isolation
        self.read_only: tuple[str, ...] = ()
        self._process = process
        self._messages: int | None = messages
        self._output: int | None = output
        self._place = place
        self._text = b""
        self._left: int | None = None
        """Exit status of the process, once it is known."""
        self._status: int | None = None
        """Exit status of the script, where the process is the one that supervises it."""

    def has_ended(self) -> bool:
        """Whether the script itself has ended. Processes that it started may still run."""
        self._look()
        return self._left is not None or self._status is not None

    def is_busy(self) -> bool:
        """Whether a process of the run is left."""
        self._look()
        if self.isolation is not Isolation.NONE:
            return self._left is None
        return bool(processes_of_run(self._place))

    def wait(self, seconds: float) -> None:
        """Waits for news of the script, and for `seconds` at most. Passes its output on to standard error."""
        open_pipes = [pipe for pipe in (self._messages, self._output) if pipe is not None]
        process = os.pidfd_open(self._process) if self._left is None and hasattr(os, "pidfd_open") else None
        select.select([*open_pipes, *([] if process is None else [process])], [], [], seconds)
        if process is not None:
            os.close(process)
        self._look()

    def wait_for_start(self) -> Refused | None:
        """Waits until the script runs. Returns why it does not."""
        since = time.monotonic()
        while time.monotonic() - since < LONGEST_START:
            self.wait(LONGEST_START)
            for line in self._text.decode(errors="replace").splitlines():
                name, *words = line.split("\t")
                if name == "refused":
                    return Refused(" ".join(words))
                if name == "started":
                    self.read_only = tuple(words)
                    return None
            if self._messages is None or self._left is not None:
                # the pipe is closed when another program replaces the process
                return None if self.isolation is Isolation.NONE else Refused("its first process ended")
        return Refused("it was not ready in time")

    def end(self) -> int:
        """Ends every process of the run. Returns the exit status of the script, which is negative after a signal."""
        for _ in range(20):
            if self.isolation is Isolation.PRELOAD and end_descendants(self._process):
                time.sleep(0.01)
                continue
            with contextlib.suppress(OSError):
                os.killpg(self._process, signal.SIGKILL)
            running = processes_of_run(self._place) if self.isolation is Isolation.NONE else []
            for process in running:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            if not running:
                break
            time.sleep(0.01)
        self._look(blocking=True)
        for pipe in (self._messages, self._output):
            if pipe is not None:
                os.close(pipe)
        self._messages = self._output = None
        return self._status if self._status is not None else self._left or 0

    def _look(self, *, blocking: bool = False) -> None:
        """Reads what the child has sent, and whether it has ended."""
        while self._messages is not None and select.select([self._messages], [], [], 0)[0]:
            text = os.read(self._messages, 65536)
            if not text:
                os.close(self._messages)
                self._messages = None
            self._text += text
        while self._output is not None and select.select([self._output], [], [], 0)[0]:
            text = os.read(self._output, 65536)
            if not text:
                os.close(self._output)
                self._output = None
            _pass_on(text)
        for line in self._text.splitlines():
            if line.startswith(b"status\t"):
                self._status = int(line.split(b"\t")[1])
        if self._left is None:
            ended, status = os.waitpid(self._process, 0 if blocking else os.WNOHANG)
            if ended:
                self._left = os.waitstatus_to_exitcode(status)


def _pass_on(text: bytes) -> None:
    """Writes output of the script to standard error. A reader that has left is no error of the analysis."""
    while text:
        try:
            text = text[os.write(2, text) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            return


def start_script(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, place: Path, isolation: Isolation
) -> ScriptProcess | Refused:
    """Starts `command` in a session of its own, so that it leaves the terminal to its caller."""
    if isolation is Isolation.NAMESPACES:
        (place / WORKSPACE).mkdir(exist_ok=True)
    job = Job(isolation, command, dict(environ), str(folder), str(place))
    read, write = os.pipe()
    output, script_output = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    child = os.fork()
    if child == 0:
        run_child(job, write, script_output)
    os.close(write)
    os.close(script_output)
    process = ScriptProcess(child, read, output, place, isolation)
    try:
        refused = process.wait_for_start()
    except BaseException:
        process.end()
        raise
    if refused is not None:
        process.end()
        return refused
    return process


def processes_of_run(place: Path) -> list[int]:
    """The processes whose environment names the folder of the run (on Linux)."""
    marker = f"{context.FOLDER_VARIABLE}={place}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if marker in environ.split(b"\0"):
            found.append(int(entry.name))
    return found
