"""Runs a launch script with stand-ins first on PATH, and returns the launches that they intercepted."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from analyzer.errors import InputError
from analyzer.script.isolation.script_process import Refused, ScriptProcess, start_script
from analyzer.script.isolation.start import Isolation
from analyzer.script.preload_library import write_library
from analyzer.script.stand_ins import context
from analyzer.script.stand_ins.dispatch import names
from analyzer.script.stand_ins.inner import SHELLS
from analyzer.script.stand_ins.launchers import PYTHONS
from analyzer.script.stand_ins.slurm import batch_variables, read_header

POLL: Final = 0.05
"""Seconds between two looks at the script."""
SETTLE: Final = 1.0
"""Seconds that processes in the background have for another launch, after the end of the script and after each launch."""
SETTLE_WITHOUT_LAUNCH: Final = 10.0
LONGEST: Final = 600.0
"""Seconds after which a script is ended."""
LONGEST_AFTER_LAUNCH: Final = 60.0
"""Seconds that a script may run after its last launch."""
END_OF_SCRIPT: Final = re.compile(r"\s*(?:#.*|(?:fi|done|esac|\}|\)|;;|;|&&|\|\|)*)\s*(?:exit\b.*)?")
"""A line after which, or in which, no other command runs: a comment, the end of a block, or exit."""
UNUSABLE: Final = re.compile(r"[\s:'\",]")
"""Characters of a folder that PATH, LD_PRELOAD and the options of overlayfs would not take."""
ISOLATION_VARIABLE: Final = "GET_TRAINING_INFO_ISOLATION"
"""The environment variable that chooses the isolation: namespaces or preload."""
LONGEST_INTERPRETER: Final = 110
"""Characters of a path after `#!`. Linux before 5.1 cuts off lines above 127."""


@dataclass(frozen=True, slots=True)
class Intercepted:
    """One launch of a script."""

    argv: tuple[str, ...]
    """The command line as the analysis reads it."""
    command: tuple[str, ...]
    """The command line as the script gave it."""
    environ: Mapping[str, str]
    folder: Path
    line: int | None
    """The line of the script."""
    source: str
    """The file of that line; empty if it is not known."""
    times: int
    """Number of times that the script started it."""
    processes: int | None = None
    """Number of processes on all nodes together, if the nodes start different numbers (`uneven_nodes`)."""
    written: Path | None = None
    """A folder with copies of the files that the launch names and the script has written, each at its absolute path."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that failed or that ended the script."""

    command: str
    line: str
    source: str
    status: str
    """The exit status; empty for `exit`."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What happened when a script ran."""

    launches: tuple[Intercepted, ...]
    status: int
    failures: tuple[Failure, ...]
    stopped: str
    """Why this program ended the script: "launches" (it repeats them), "sleeps" (it waits), "time" (it does not end), or empty."""
    isolation: Isolation = Isolation.NONE
    programs: Mapping[str, int] = field(default_factory=dict)
    """How often each program ran, without stand-ins and builtin commands of a shell. Empty if it is not known."""
    read_only: tuple[str, ...] = ()
    """Folders in which the script could not write, because their file system cannot be copied."""
    waits: tuple[str, ...] = ()
    """Line and file of each `sleep` in a loop that waited for something that did not come, and was left."""
    early_end: Failure | None = None
    """The command that ended the script with an error before its last line."""


@contextlib.contextmanager
def run_script(
    script: Path, arguments: Sequence[str], *, environ: Mapping[str, str], folder: Path, run_all: bool = False
) -> Iterator[ScriptRun]:
    """Runs `script` in `folder`. Its standard output goes to standard error, and its standard input is empty.

    Nothing that it does outlasts the run, except with `run_all`, where every command but launchers runs as it is. #SBATCH lines set
    the variables of Slurm that `environ` does not have. The copies of written files exist until the context ends. Raises InputError
    if there is no shell, no folder for the stand-ins, or nothing on this machine that keeps the script from changing it.
    """
    command = [*_interpreter(script, environ), _with_folder(script), *arguments]
    with _folder_of_run() as place:
        with _signals_end_the_run():
            _write_stand_ins(place, run_all=run_all)
            variables = _environment(script, environ, folder, place, run_all=run_all)
            process = _start(command, script, variables, folder, place, run_all=run_all)
            try:
                stopped = _wait(process, place)
            finally:
                status = process.end()
        failures = _failures(place)
        yield ScriptRun(
            launches=_launches(place, has_lines=script.suffix != ".py"),
            status=status,
            failures=failures,
            stopped=stopped,
            isolation=process.isolation,
            programs=_programs(place),
            read_only=process.read_only,
            waits=_waits(place),
            early_end=_early_end(failures, script, place) if status != 0 and not stopped else None,
        )


def _start(
    command: Sequence[str], script: Path, variables: dict[str, str], folder: Path, place: Path, *, run_all: bool
) -> ScriptProcess:
    """Starts the script in the best isolation that this machine has."""
    if run_all:
        started = start_script(command, variables, folder, place, Isolation.NONE)
        assert isinstance(started, ScriptProcess)
        return started
    reasons = []
    if _is_of_others(folder) and context.PRELOAD_VARIABLE in variables:
        variables[context.PROTECT_VARIABLE] = "1"  # overlayfs does not copy files of users who are unknown in the namespace
    for isolation in _isolations(variables):
        if isolation is Isolation.PRELOAD:
            if context.PRELOAD_VARIABLE not in variables:
                reasons.append("no C compiler builds the protecting library")
                continue
            variables[context.PROTECT_VARIABLE] = "1"
        result = start_script(command, variables, folder, place, isolation)
        if not isinstance(result, Refused):
            return result
        reasons.append(f"{isolation}: {result.reason}")
    fault = f"cannot run here without changing this machine ({'; '.join(reasons)})"
    remedy = "allow user namespaces, install gcc, or run it with --info-run-all, which changes what the script changes"
    raise InputError(str(script), fault, remedy)


def _is_of_others(folder: Path) -> bool:
    """Whether a user who is not the administrator writes in a folder that belongs to somebody else, such as that of a project."""
    try:
        own = os.geteuid()
        return own != 0 and any(each.stat().st_uid != own and os.access(each, os.W_OK) for each in (folder, *folder.parents))
    except OSError:
        return False


def _isolations(environ: Mapping[str, str]) -> tuple[Isolation, ...]:
    """The kinds of isolation to try, the best first. ISOLATION_VARIABLE chooses one."""
    if platform.system() != "Linux":
        return ()
    chosen = environ.get(ISOLATION_VARIABLE)
    both = (Isolation.NAMESPACES, Isolation.PRELOAD)
    return tuple(each for each in both if chosen in (None, "", each))


class Interrupted(SystemExit):
    """A signal ended this program while a script ran. The code is 128 plus its number."""


@contextlib.contextmanager
def _signals_end_the_run() -> Iterator[None]:
    """Signals that end a program raise Interrupted, so that no process and no file is left."""

    def stop(number: int, _frame: object) -> None:
        raise Interrupted(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _with_folder(script: Path) -> str:
    """The path as bash takes it for a file, and not for a name on PATH."""
    return str(script) if script.is_absolute() or len(script.parts) > 1 else f"./{script}"


def _interpreter(script: Path, environ: Mapping[str, str]) -> list[str]:
    """The shell of the script with its options. bash runs scripts for sh, because it reads the file of the run.

    Python runs a Python file.
    """
    if script.suffix == ".py":
        return [next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in PYTHONS)), sys.executable)]
    with script.open("rb") as file:
        first = file.readline(500).decode(errors="replace").strip()
    words = first[2:].split() if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
    name = os.path.basename(words[0]) if words else "bash"
    shell = name if name in ("zsh", "csh", "tcsh", "fish") else "bash"
    path = shutil.which(shell, path=environ.get("PATH", os.defpath))
    if path is None:
        raise InputError(str(script), f"is a script for {shell}, which is not installed", f"install {shell}")
    return [path, *(words[1:] if name in SHELLS or shell != "bash" else [])]


@contextlib.contextmanager
def _folder_of_run() -> Iterator[Path]:
    """A temporary folder whose files can be executed."""
    for parent in (None, os.environ.get("XDG_RUNTIME_DIR"), os.path.expanduser("~/.cache"), "."):
        above = parent or tempfile.gettempdir()
        if not os.path.isdir(above) or UNUSABLE.search(os.path.realpath(above)):
            continue
        place = Path(tempfile.mkdtemp(prefix="get_training_info_", dir=above)).resolve()
        try:
            if not os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 8):
                yield place
                return
        finally:
            _remove(place)
    fault = "no folder for temporary files allows programs, and has a path without blanks, colons and quotes"
    raise InputError("TMPDIR", fault, "set TMPDIR to such a folder that is not mounted with noexec")


def _remove(place: Path) -> None:
    """Removes the folder of the run, also folders in it that the script has made unreadable."""
    for folder, below, _ in os.walk(place):
        for each in below:
            path = os.path.join(folder, each)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(place, ignore_errors=True)


def _write_stand_ins(place: Path, *, run_all: bool) -> None:
    (place / "bin").mkdir()
    (place / "records").mkdir()
    program = place / "stand_in"
    program.write_text(_stand_in_text(Path(__file__).parent / "stand_ins"))
    program.chmod(0o755)
    for name in names(run_all=run_all):
        os.link(program, place / "bin" / name)
    text = (Path(__file__).parent / "bash_env.sh").read_text()
    (place / "bash_env").write_text(f"__info_folder={_quoted(str(place))}\n{text}")


def _stand_in_text(folder: Path) -> str:
    """The program of every stand-in. Python runs it directly: sh would drop the functions that bash exports to its children."""
    python = os.path.realpath(sys.executable)
    if len(python) > LONGEST_INTERPRETER or any(character.isspace() for character in python):
        return f'#!/bin/sh\nexec {_quoted(python)} -I -S {_quoted(str(folder / "start.py"))} "$0" "$@"\n'
    lines = ("import sys", f"sys.path.append({str(folder)!r})", "import start", "start.run(sys.argv)")
    return "\n".join((f"#!{python} -IS", *lines, ""))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _environment(script: Path, environ: Mapping[str, str], folder: Path, place: Path, *, run_all: bool) -> dict[str, str]:
    """The environment of the script."""
    replaced = {f"BASH_FUNC_{name}%%" for name in names(run_all=run_all) if name not in ("module", "ml")}
    variables = {name: value for name, value in environ.items() if name not in replaced and name != "POSIXLY_CORRECT"}
    for name, value in batch_variables(read_header(str(script)), script=str(script), folder=str(folder)).items():
        variables.setdefault(name, value)
    variables[context.FOLDER_VARIABLE] = str(place)
    variables[context.BASH_ENV_VARIABLE] = environ.get("BASH_ENV", "")
    variables[context.BATCH_VARIABLE] = str((folder / script).resolve())
    if run_all:
        variables[context.RUN_ALL_VARIABLE] = "1"
    library = place / "preload.so"
    if write_library(library, environ):
        variables[context.PRELOAD_VARIABLE] = str(library)
        variables["LD_PRELOAD"] = ":".join(filter(None, [str(library), environ.get("LD_PRELOAD", "")]))
    variables["BASH_ENV"] = str(place / "bash_env")
    variables["PATH"] = os.pathsep.join([str(place / "bin"), environ.get("PATH", os.defpath)])
    return variables


def _wait(process: ScriptProcess, place: Path) -> str:
    """Waits for the script and for its processes in the background. Returns why it is to be ended, or nothing."""
    stop = place / "stop"
    since, known = time.monotonic(), 0
    while not process.has_ended() and not stop.exists():
        process.wait(POLL)
        launches = len(os.listdir(place / "records"))
        if launches != known:
            since, known = time.monotonic(), launches
        if time.monotonic() - since > (LONGEST_AFTER_LAUNCH if launches else LONGEST):
            return "time"
    since, known = time.monotonic(), -1
    while not stop.exists() and process.is_busy():
        launches = len(os.listdir(place / "records"))
        if launches != known:
            since, known = time.monotonic(), launches
        if time.monotonic() - since > (SETTLE if launches else SETTLE_WITHOUT_LAUNCH):
            break
        process.wait(POLL)
    return stop.read_text() if stop.exists() else ""


def _launches(place: Path, *, has_lines: bool) -> tuple[Intercepted, ...]:
    """The launches in the order in which they started. One that was started several times is kept once.

    `has_lines`: the shell notes the line of each command.
    """
    entries = [json.loads(path.read_text()) for path in sorted((place / "records").glob("*.json"))]
    identities = [entry["identity"] for entry in entries]
    launches = []
    for position, entry in enumerate(entries):
        if entry["identity"] in identities[:position]:
            continue
        line, _, source = entry["line"].partition(" ") if has_lines else ("", "", "")
        launches.append(
            Intercepted(
                argv=tuple(entry["argv"]),
                command=tuple(entry["command"]),
                environ=entry["environ"],
                folder=Path(entry["folder"]),
                line=int(line) if line.isdigit() else None,
                source=source,
                times=identities.count(entry["identity"]),
                written=Path(entry["written"]) if entry["written"] else None,
            )
        )
    return tuple(launches)


def _failures(place: Path) -> tuple[Failure, ...]:
    path = place / "failures"
    if not path.exists():
        return ()
    rows = [line.split("\t") for line in path.read_text(errors="replace").splitlines()]
    return tuple(Failure(command=row[4], line=row[2], source=row[3], status=row[1]) for row in rows if len(row) == 5)


def _early_end(failures: Sequence[Failure], script: Path, place: Path) -> Failure | None:
    """The last failure if it ended the script and commands follow it.

    Without set -e and set -u the status of a script is that of its last command, which may be that of a test.
    """
    by_option = (place / "ended_by_option").exists()
    last = failures[-1] if failures else None
    if last is None or (last.status and not by_option) or not last.line.isdigit():
        return None
    if os.path.basename(last.source) != script.name:
        return last
    following = script.read_text(errors="replace").splitlines()[int(last.line) :]
    return last if any(line.strip() and not END_OF_SCRIPT.fullmatch(line) for line in following) else None


def _programs(place: Path) -> dict[str, int]:
    """How often each program of this machine ran, by name."""
    path = place / "programs"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return dict(Counter(os.path.basename(line) for line in lines))


def _waits(place: Path) -> tuple[str, ...]:
    path = place / "waits"
    return tuple(path.read_text(errors="replace").splitlines()) if path.exists() else ()
