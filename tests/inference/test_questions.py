"""The commands that answer the questions of llm-analysis, in docs/inference.md; test_doc_commands.py tests what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.doc_commands import ROOT, blocks, prepare, run

PAGE = ROOT / "docs" / "inference.md"

pytestmark = pytest.mark.slow


def answers(folder: Path) -> list[str]:
    """What the commands of the section about questions print. Nothing may go to standard error."""
    text = PAGE.read_text()
    first, last = (text[: text.index(mark)].count("\n") for mark in ("## Questions", "The answers in one table."))
    prepare(folder)
    done = [run(block, folder) for block in blocks(PAGE) if first < block.line < last]
    assert [each.stderr for each in done] == [""] * len(done)
    return [each.stdout for each in done]


def test_the_commands_answer_their_questions(tmp_path: Path) -> None:
    """70.6 billion parameters of 2 bytes need two GPUs of 80 GB; bits and memory of the GPU allow larger batches."""
    fits, largest, dtypes, gpus, others = answers(tmp_path)
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
