"""A launch script changes no file, signals no process and opens no connection, and its launch is found."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from analyzer.script.preload_library import COMPILERS
from tests.script.commands import LAUNCH, printed, run
from tests.script.snippets import SNIPPETS, WAITS

pytestmark = pytest.mark.slow
OUTSIDE = (Path("/data/get_training_info_canary"), Path("/tmp/get_training_info_canary"), Path("/dev/shm/get_training_info_canary"))
"""Paths outside the folders of the test to which snippets write."""


def namespaces_are_allowed() -> bool:
    """Whether this machine lets a user make an overlay in a namespace."""
    words = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs t /mnt && cd /mnt && mkdir u w m && "]
    words[-1] += "mount -t overlay o -o lowerdir=/usr,upperdir=u,workdir=w,userxattr m"
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


MODES = (
    pytest.param("namespaces", marks=pytest.mark.skipif(not namespaces_are_allowed(), reason="namespaces are not allowed")),
    pytest.param(
        "preload",
        marks=pytest.mark.skipif(all(shutil.which(name) is None for name in COMPILERS), reason="there is no C compiler"),
    ),
)


@dataclass(frozen=True)
class Machine:
    """What a script could change: folders, a process and servers."""

    folder: Path
    home: Path
    environ: dict[str, str]
    victim: subprocess.Popen[bytes]
    servers: tuple[socket.socket, ...]

    def state(self) -> dict[str, tuple[object, ...]]:
        """Kind, permissions, size, time, number and a digest of the content of each file, folder and link."""
        found: dict[str, tuple[object, ...]] = {}
        for place, folders, names in os.walk(self.folder):
            for name in [*folders, *names]:
                path = Path(place, name)
                status = path.lstat()
                content = os.readlink(path) if path.is_symlink() else ""
                if path.is_file():
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                # the folder of temporary files has held those of the run
                time = 0 if path == self.folder / "tmp" else status.st_mtime_ns
                found[str(path)] = (status.st_mode, status.st_size, time, status.st_ino, content)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Folders with files, a process that waits, and servers that count connections."""
    folder, home = tmp_path / "work", tmp_path / "home"
    for each in (folder / "data", folder / "tools" / "checkpoint", folder / "repo", home, tmp_path / "out", tmp_path / "tmp"):
        each.mkdir(parents=True)
    for name in ("train.log", "config.json", "data/a.txt", "data/b.txt", "../home/.profile", "../home/lock", "../out/canary.txt"):
        (folder / name).write_text(f"a\ncontent of {name}\n")
    changing = "import os, shutil\nshutil.rmtree('data')\nopen('train.log', 'w').close()\n"
    for name in ("run.py", "tools/preprocess_data.py", "tools/checkpoint/convert.py"):
        (folder / name).write_text(changing)
    (folder / "latest").symlink_to("train.log")
    git = ["git", "-c", "init.defaultBranch=main", "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], cwd=folder / "repo", check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=folder / "repo", check=True)
    victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (folder / "victim.pid").write_text(f"{victim.pid}\n")
    servers = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    )
    port = servers[0].getsockname()[1]
    previous = Path.cwd()
    os.chdir(folder)  # the path of a socket is short
    servers[1].bind("server.sock")
    os.chdir(previous)
    servers[1].listen()
    servers[2].bind(("127.0.0.1", port))
    environ = {
        "HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"), "VICTIM": str(victim.pid),
        "PORT": str(port), "OUT": str(tmp_path / "out"), "USER": "user",
    }  # fmt: skip
    try:
        yield Machine(tmp_path, home, environ, victim, servers)
    finally:
        victim.kill()
        victim.wait()
        for server in servers:
            server.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the compiled library, which does not count as a change."""
    return tmp_path_factory.mktemp("cache")


def text_of(snippet: str) -> str:
    """A whole script."""
    text = snippet.replace("LAUNCH", LAUNCH)
    if "LAUNCH" not in snippet:
        text += f"\n{LAUNCH}"
    return text + "\n" if text.startswith("#!") else f"#!/bin/bash\n{text}\n"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_nothing_changes_and_the_launch_is_found(snippet: str, mode: str, machine: Machine, cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "work" / "launch.sh"
    script.write_text(text_of(snippet))
    before = machine.state()
    environ = {**machine.environ, "XDG_CACHE_HOME": str(cache), "GET_TRAINING_INFO_ISOLATION": mode}
    done = run(script, "--info-dry", folder=script.parent, environ=environ)
    assert machine.state() == before
    assert not [path for path in OUTSIDE if path.exists()]
    assert machine.victim.poll() is None
    assert Path(f"/proc/{machine.victim.pid}/stat").read_text().split()[2] == "S"
    assert select.select(machine.servers, [], [], 0)[0] == []
    assert done.returncode == 0, done.stderr
    assert len(printed(done.stdout)) == 1, done.stderr
    assert ("a loop that waits was left" in done.stderr) == (snippet in WAITS)


def test_there_are_enough_snippets() -> None:
    assert len(set(SNIPPETS)) >= 120
    assert sys.platform == "linux" or not MODES
