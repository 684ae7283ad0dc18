"""The isolation of a launch script: what it sees, what is kept for the analysis, and what is said."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from analyzer.script.isolation.mounts import read_mounts
from tests.script.commands import LAUNCH, MODEL, PROGRAM, executable, printed, run, run_text
from tests.script.test_nothing_changes import MODES

pytestmark = pytest.mark.slow

PACKAGES = sysconfig.get_path("purelib")


@pytest.mark.parametrize("mode", MODES)
def test_a_launch_reads_the_files_that_the_script_wrote(mode: str, tmp_path: Path) -> None:
    """Each launch reads the content at its time."""
    text = """
mkdir -p generated && cd generated
for slots in 2 4; do
    printf "node1 slots=$slots\\nnode2 slots=$slots\\n" > hosts
    deepspeed --hostfile hosts ../pretrain_gpt.py MODEL
done""".replace("MODEL", MODEL)
    environ = {"GET_TRAINING_INFO_ISOLATION": mode}
    done = run_text(text, "--info-json", "out.json", "--info-gpu", "H100-80GB", folder=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    sizes = [json.loads((tmp_path / name).read_text())["world"]["size"] for name in ("out.json", "out-2.json")]
    assert sizes == [4, 8]
    assert not (tmp_path / "generated").exists()


@pytest.mark.parametrize("mode", MODES)
def test_programs_that_ran_are_counted_and_named(mode: str, tmp_path: Path) -> None:
    environ = {"GET_TRAINING_INFO_ISOLATION": mode}
    text = f"cat /dev/null\ncat /dev/null\nseq 2 > f\n{LAUNCH}"
    done = run_text(text, "--info-dry", folder=tmp_path, environ=environ)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("get-training-info: 3 programs of the script ran ")
    assert last.endswith(" nothing was kept: cat (2 times), seq")
    done = run_text(text, "--info-gpu", "H100-80GB", folder=tmp_path, environ=environ)
    assert done.stderr.splitlines()[-1].endswith(" nothing was kept")


def test_without_isolation_no_script_runs(tmp_path: Path) -> None:
    """Where neither namespaces nor a compiler are there, the error names the option that gives up the protection."""
    folder = tmp_path / "bin"
    for name in ("bash", "sh", "python3", "touch"):
        executable(folder / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
    script = tmp_path / "launch.sh"
    script.write_text(f"#!/bin/bash\ntouch made\n{LAUNCH}\n")
    environ = {"PATH": str(folder), "GET_TRAINING_INFO_ISOLATION": "preload", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "cannot run here without changing this machine (no C compiler" in done.stderr
    assert "--info-run-all" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"set -e\n{LAUNCH}\ncp missing there\n{LAUNCH} --log-interval 7",
            "cp missing there (line 4 of launch.sh) failed with status 1",
        ),
        (f"{LAUNCH}\nexit 5\n{LAUNCH} --log-interval 7", "exit 5 (line 3 of launch.sh) ended the script with status 5"),
        (f"set -u\n{LAUNCH}\necho $UNSET\ndate", "echo $UNSET (line 4 of launch.sh) failed with status 1"),
    ],
)
def test_a_script_that_ends_with_an_error_between_launches_is_an_error(text: str, said: str, tmp_path: Path) -> None:
    done = run_text(text, "--info-gpu", "H100-80GB", folder=tmp_path)
    assert done.returncode == 2
    assert "It fits" in done.stdout
    assert f"ended after 1 launch: {said}. Later launches are missing" in done.stderr.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("end", ["exit 5", "[ -f missing ] && date", "fi_is_no_end=1; false"])
def test_the_status_of_the_last_command_is_no_error(end: str, tmp_path: Path) -> None:
    assert run_text(f"{LAUNCH}\n{end}", "--info-dry", folder=tmp_path).returncode == 0


def test_arguments_that_a_script_does_not_read_are_named(tmp_path: Path) -> None:
    done = run_text(LAUNCH, "--tensor-model-parallel-size", "4", "--info-dry", folder=tmp_path)
    assert "does not use its arguments, which have no effect: --tensor-model-parallel-size 4" in done.stderr
    done = run_text(f'{LAUNCH} "$@"', "--tensor-model-parallel-size", "4", "--info-dry", folder=tmp_path)
    assert "does not use" not in done.stderr
    assert printed(done.stdout)[0].value("--tensor-model-parallel-size") == "4"


@pytest.mark.parametrize(
    "start", ["subprocess.run(words)", "os.execvp(words[0], words)", "os.system(' '.join(words))", "subprocess.call(words)"]
)
def test_a_python_file_that_starts_a_launcher_is_a_script(start: str, tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(f"import os, subprocess, sys\nopen('made', 'w').close()\nwords = {LAUNCH.split()} + sys.argv[1:]\n{start}\n")
    done = run(script, "--log-interval", "7", "--info-dry", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout)[0].value("--log-interval") == "7"
    assert not (tmp_path / "made").exists()


def test_the_terminal_stays_with_the_caller(tmp_path: Path) -> None:
    """A script with a pipe in a command substitution does not become the foreground of the terminal, and Ctrl-C ends the run."""
    (tmp_path / "launch.sh").write_text("x=$(echo a | cat)\nread -r y < /dev/tty\nsleep 1\nwhile :; do x=$(echo a | cat); done\n")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, str(PROGRAM), "launch.sh"])
    time.sleep(1.0)
    assert os.tcgetpgrp(terminal) == process
    os.write(terminal, b"\x03")
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130


@pytest.mark.parametrize("mode", MODES)
def test_the_file_of_standard_error_keeps_its_content(mode: str, tmp_path: Path) -> None:
    script, log = tmp_path / "launch.sh", tmp_path / "log"
    script.write_text(f"echo one > /dev/stderr; : > /dev/stdout; truncate -s 0 /dev/stderr; echo two\n{LAUNCH}\n")
    log.write_text("old\n")
    with log.open("a") as stream:
        environ = {**os.environ, "GET_TRAINING_INFO_ISOLATION": mode, "TMPDIR": str(tmp_path)}
        command = [sys.executable, str(PROGRAM), "launch.sh", "--info-dry"]
        subprocess.run(command, cwd=tmp_path, env=environ, stderr=stream, stdout=subprocess.DEVNULL, check=True)
    lines = log.read_text().splitlines()
    assert (lines[0], lines[1]) == ("old", "one")
    assert "two" in lines


DAEMON = """perl -e 'use POSIX; $0="{mark}"; fork and exit; setsid; fork and exit; select(undef, undef, undef, 0.1) while 1'"""
"""A daemon that overwrites its environment, by which it could be found."""


def is_running(mark: str) -> bool:
    """Whether a process has `mark` in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def becomes(running: bool, mark: str) -> bool:
    """Whether a process with `mark` runs, or none runs, within 10 s."""
    for _ in range(200):
        if is_running(mark) == running:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("mode", MODES)
def test_a_daemon_ends_with_the_run(mode: str, tmp_path: Path) -> None:
    mark = f"daemon_of_{tmp_path.name}_{mode}"
    done = run_text(
        f"{DAEMON.format(mark=mark)}\n{LAUNCH}", "--info-dry", folder=tmp_path, environ={"GET_TRAINING_INFO_ISOLATION": mode}
    )
    assert len(printed(done.stdout)) == 1
    assert not is_running(mark)


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_program_leaves_no_process(mode: str, tmp_path: Path) -> None:
    mark = f"left_of_{tmp_path.name}_{mode}"
    (tmp_path / "launch.sh").write_text(f"{DAEMON.format(mark=mark)}\necho started >&2\nwhile true; do :; done\n")
    environ = {**os.environ, "GET_TRAINING_INFO_ISOLATION": mode, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), "launch.sh"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while process.stderr.readline() != b"started\n":
            pass
        assert becomes(True, mark)  # the daemon may still be between its two forks
        process.kill()
    assert becomes(False, mark)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("folder", ["/dev/shm", "blank and:colon", "plain"])
def test_odd_folders_for_temporary_files(folder: str, mode: str, tmp_path: Path) -> None:
    temporary = tmp_path / folder  # an absolute path stays as it is
    temporary.mkdir(exist_ok=True)
    text = f"T=$(mktemp -d); mkdir -p $T/deep/er; chmod -R 000 $T\n{LAUNCH}"
    before = set(temporary.iterdir())
    environ = {"GET_TRAINING_INFO_ISOLATION": mode, "TMPDIR": str(temporary)}
    done = run_text(text, "--info-dry", folder=tmp_path, environ=environ)
    assert len(printed(done.stdout)) == 1, done.stderr
    if temporary != Path("/dev/shm"):  # where other tests may have theirs
        assert set(temporary.iterdir()) == before


@pytest.mark.parametrize("fork", ["setsid -f", "setsid --fork"])
def test_setsid_returns_at_once(fork: str, tmp_path: Path) -> None:
    done = run_text(f"{fork} perl -e 'select(undef, undef, undef, 0.1) while 1'\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
"""The start of a command of another user, who may not read the home folder of root."""


def python_of_everybody() -> str | None:
    """A Python that another user can start, and that can start itself again, with `PACKAGES` in its path."""
    again = "subprocess.run([sys.executable, '-c', ''], check=True)"
    text = f"import subprocess, sys; sys.path.append({PACKAGES!r}); import rich; {again}"
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")):
        if python and subprocess.run([*NOBODY, python, "-c", text], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="another user is needed")
@pytest.mark.parametrize("mode", MODES)
def test_a_user_writes_in_a_folder_of_a_project(mode: str) -> None:
    """A folder that belongs to somebody else, and in which everybody may write."""
    with tempfile.TemporaryDirectory(prefix="project", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "shared.cfg").write_text("a\n")
        (folder / "shared.cfg").chmod(0o666)
        text = f"set -e\nmkdir -p sub/ckpt\necho b >> shared.cfg\ncat shared.cfg\nrm shared.cfg\n{LAUNCH}\n"
        (folder / "launch.sh").write_text(text)
        environ = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/nonexistent",
            "PYTHONPATH": PACKAGES,
            "GET_TRAINING_INFO_ISOLATION": mode,
        }
        python = python_of_everybody()
        if python is None:
            pytest.skip("another user cannot start Python")
        command = [*NOBODY, python, str(PROGRAM), "launch.sh", "--info-dry"]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert len(printed(done.stdout)) == 1, done.stderr
        assert (folder / "shared.cfg").read_text() == "a\n"
        assert not (folder / "sub").exists()


def test_nodes_with_different_numbers_of_processes_are_one_launch(tmp_path: Path) -> None:
    """4 processes on the first node and 3 on the second are 7 GPUs."""
    node = "torchrun --nproc_per_node {} --nnodes 2 --node_rank {} --master_addr h pretrain_gpt.py " + MODEL
    done = run_text(f"{node.format(4, 0)} &\n{node.format(3, 1)}\nwait", "--info-json", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the nodes start 7 processes together: 7 GPUs are analyzed" in done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["world"]["size"] == 7
    assert not (tmp_path / "out-2.json").exists()


def test_mount_points_with_spaces_are_read() -> None:
    """The example of proc_pid_mountinfo(5), and a mount point with escapes."""
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "40 36 0:40 / /mnt/a\\040b\\134c rw - autofs systemd-1 rw\n"
    )
    assert read_mounts(text) == {"/mnt2": "ext3", "/mnt/a b\\c": "autofs"}
