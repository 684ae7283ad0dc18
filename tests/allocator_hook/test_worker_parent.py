"""Worker processes end when the process that started them is killed. Needs no package of the shadow engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
    import os, sys, time
    from pathlib import Path
    from allocator_hook.shadow.parent import end_with_parent, remove_when_parent_ends
    remove_when_parent_ends(Path(sys.argv[2]), int(sys.argv[1]))
    worker = os.getpid()
    if os.fork() == 0:
        end_with_parent(worker)
        print(worker, os.getpid(), flush=True)
    time.sleep(60)
"""
MISSED = """
    import signal, threading, time
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""
"""The kernel gives SIGTERM to the other thread: as if it came just before the call in which the main thread waits."""
CALLER = """
    import os, subprocess, sys
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], start_new_session=True).wait()
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of the parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_workers_and_their_folder_disappear_with_the_caller(tmp_path: Path, number: signal.Signals) -> None:
    end_of_workers(tmp_path, textwrap.dedent(WORKER), number)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of the parent")
def test_a_signal_that_does_not_interrupt_a_waiting_worker_ends_it(tmp_path: Path) -> None:
    start, _, wait = textwrap.dedent(WORKER).rpartition("time.sleep(60)")
    end_of_workers(tmp_path, start + textwrap.dedent(MISSED) + "time.sleep(60)" + wait, signal.SIGKILL)


def end_of_workers(tmp_path: Path, worker: str, number: signal.Signals) -> None:
    """Ends the caller of two workers by a signal, and asserts that they and their folder disappear."""
    folder = tmp_path / "unfinished"
    folder.mkdir()
    (folder / "half.trace").write_bytes(b"half")
    command = [sys.executable, "-c", textwrap.dedent(CALLER), worker, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        workers = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(workers) == 2
        caller.send_signal(number)
        caller.wait(timeout=10)
        deadline = time.monotonic() + 10
        while (any(map(running, workers)) or folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not any(map(running, workers))
    assert not folder.exists()
