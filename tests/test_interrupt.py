"""Ctrl-C ends the program with status 130 and without a traceback, at any moment after the start of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.job_of import BASE

ROOT = Path(__file__).parents[1]
LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64")
PROGRAM = """
import os, signal, sys, weakref

class Object:
    pass

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            if {callback}:
                interrupted = Object()
                callback = weakref.ref(interrupted, interrupt)
                del interrupted
            else:
                interrupt()

sys.meta_path.insert(0, Finder())
sys.argv = ["get-training-info", *{words!r}]
from get_training_info import program
sys.exit(program())
"""


def interrupted(module: str, *, callback: bool = False) -> subprocess.CompletedProcess[str]:
    """The program, which gets SIGINT when it imports a module: in the import, or in a callback whose errors Python ignores."""
    code = PROGRAM.format(module=module, callback=callback, words=LAUNCH)
    return subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["analyzer", "analyzer.api", "analyzer.cli.main", "analyzer.cli.output", "analyzer.predict", "rich.console"]
)
def test_an_interruption_of_an_import_is_quiet(module: str) -> None:
    found = interrupted(module)
    assert (found.returncode, found.stdout) == (130, "")
    assert found.stderr in ("", "get-training-info: interrupted\n")


@pytest.mark.slow
def test_an_interruption_of_a_callback_is_not_lost() -> None:
    found = interrupted("analyzer.predict", callback=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "get-training-info: interrupted\n")


@pytest.mark.slow
def test_an_import_of_the_program_changes_no_signal() -> None:
    code = "import signal, get_training_info; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, cwd=ROOT).stdout == "True\n"
