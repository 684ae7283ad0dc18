"""The commands that answer the questions of llm-analysis, in docs/inference.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "inference.md").read_text().partition("## Questions")[2].partition("The answers in one table.")[0]
BLOCKS = re.findall(r"```(bash|text)\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the installed command."""
    command = tmp_path / "get-training-info"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/get_training_info.py" "$@"\n')
    command.chmod(0o755)
    return tmp_path


def printed(command: str, folder: Path) -> str:
    """What bash prints. Nothing may go to standard error."""
    environ = {"PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}", "HOME": str(folder), "COLUMNS": "100"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout


def test_the_page_has_what_its_commands_print(folder: Path) -> None:
    shown = 0
    for (kind, command), (following, text) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind == "bash" and following == "text":
            assert printed(command, folder).startswith(text)
            shown += 1
    assert shown == 3
    assert sum(kind == "bash" for kind, _ in BLOCKS) == 5


def test_the_commands_answer_their_questions(folder: Path) -> None:
    """70.6 billion parameters of 2 bytes need two GPUs of 80 GB; bits and memory of the GPU allow larger batches."""
    answers = [printed(command, folder) for kind, command in BLOCKS if kind == "bash"]
    fits, largest, dtypes, gpus, others = answers
    assert fits.startswith("It does not fit: ")
    assert "largest batch" in largest
    assert "longest sequence" in largest

    def batches(text: str) -> list[int]:
        return [int(each.replace(",", "")) for each in re.findall(r"largest batch +([\d,]+|none)", text.replace("none", "0"))]

    for text, number in ((dtypes, 5), (gpus, 4), (others, 4)):
        assert len(batches(text)) == number
        assert min(batches(text)) == batches(text)[0] < batches(text)[-1]
    assert batches(gpus) == sorted(batches(gpus))
    assert batches(gpus)[0] == 0
    assert batches(gpus)[1] == batches(dtypes)[0] > 0
    assert gpus.splitlines()[1].startswith("It does not fit: ")
    assert [line.split(":")[0] for line in gpus.splitlines() if line.startswith("It ")] == ["It does not fit", *["It fits"] * 3]
