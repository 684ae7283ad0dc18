"""Runs the program in this process and captures exit status, standard output and standard error."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from get_training_info import main


@dataclass(frozen=True)
class Outcome:
    """The result of a run of the program."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON report on standard output."""
        content: dict[str, Any] = json.loads(self.out)
        return content


def run(*argv: str) -> Outcome:
    """Run `get_training_info.py ARGV`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    return Outcome(status, out.getvalue(), err.getvalue())


def report(*argv: str) -> dict[str, Any]:
    """Return the JSON report of a launch. The run must succeed without messages, but for lines about a search that takes long."""
    outcome = run(*argv, "--info-json", "-")
    assert outcome.status in (0, 1), outcome.err
    assert all("searching for" in line for line in outcome.err.splitlines()), outcome.err
    return outcome.report


def torchrun(world_size: int) -> tuple[str, ...]:
    """Return torchrun's options for nodes of at most eight GPUs."""
    per_node = min(8, world_size)
    assert world_size % per_node == 0
    return ("--nnodes", str(world_size // per_node), "--nproc-per-node", str(per_node), "pretrain_gpt.py")


def assert_refused(outcome: Outcome, named: str) -> None:
    """Assert exit status 2, no standard output, and one line on standard error that names the option and a remedy."""
    assert outcome.status == 2, outcome.out[:300]
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    program, option, rest = outcome.err.split(": ", 2)
    assert program == "get-training-info"
    assert option.split()[0] == named, outcome.err
    fault, semicolon, remedy = rest.rpartition("; ")
    assert semicolon, outcome.err
    assert fault, outcome.err
    assert remedy.strip(), outcome.err
    assert "Traceback" not in outcome.err
