"""Typical mistakes: what the message must name, and the command corrected as it says, which must work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import run

FILE = Path(__file__).resolve().parents[1] / "data" / "mistakes.json"
TABLE: dict[str, Any] = json.loads(FILE.read_text())
RUNS_A_SCRIPT = "$SCRIPT"
"""Command lines with it run a script, which takes several processes."""


def words(line: str) -> list[str]:
    """The words of a command line of the table, with its parts put in."""
    for name, part in TABLE["parts"].items():
        line = line.replace(name, part)
    return line.split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the command lines name."""
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\ntorchrun {' '.join(words('$LAUNCH'))}\n")
    (tmp_path / "empty.sh").write_text("#!/bin/bash\ntrue\n")
    (tmp_path / "run.log").write_text(" iteration 5/ 10 | elapsed time per iteration (ms): 1234.5 | global batch size: 8 |\n" * 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def each() -> list[Any]:
    return [
        pytest.param(case, id=case["wrong"], marks=[pytest.mark.slow] if RUNS_A_SCRIPT in case["right"] else [])
        for case in TABLE["mistakes"]
    ]


def test_the_table_has_forty_mistakes_in_the_quick_tests() -> None:
    assert sum(not case.marks for case in each()) >= 40


@pytest.mark.parametrize("case", each())
def test_the_remedy_of_a_mistake_works(case: dict[str, Any], folder: Path) -> None:
    if "old.json" in case["right"]:
        assert run(*words("$LAUNCH --info-json"), str(folder / "old.json")).status == 0
    wrong = run(*words(case["wrong"]))
    assert wrong.status == 2, wrong.out[:300]
    message = wrong.err.splitlines()[-1]
    assert [name for name in case["names"] if name not in message] == [], message
    right = run(*words(case["right"]))
    assert right.status in (0, 1), right.err
    assert right.out or "FILE" in case["right"]
