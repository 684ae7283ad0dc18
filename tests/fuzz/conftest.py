"""The tests of this folder run in an empty folder, in an environment without variables of the user, and start no processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

KEPT = ("PATH", "TMPDIR")
"""Variables of the environment that the tests keep."""


class ProcessStartedError(BaseException):
    """A test has started a process. Not an `Exception`, so that the program does not report it as its own error."""


def _refuse(*_args: object, **_named: object) -> None:
    raise ProcessStartedError


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of the test."""
    own = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(KEPT):
            if not name.startswith(("PYTEST", "HYPOTHESIS")):
                patch.delenv(name)
        patch.setenv("HOME", str(own))
        patch.chdir(own)
        patch.setattr("analyzer.hardware.gpus.DRIVER_FILES", ())
        patch.setattr(subprocess, "Popen", _refuse)
        for name in ("execv", "execve", "execvp", "execvpe", "posix_spawn", "fork", "system"):
            patch.setattr(os, name, _refuse)
        yield own
