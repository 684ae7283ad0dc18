"""tools/compare_reports.py: keys and numbers must be equal, text may differ."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.compare_reports import compare, differences

REPORT: dict[str, Any] = {
    "schema": "training-info/1",
    "ranks": [{"ranks": [[0, 7]], "memory": {"peak_allocated_bytes": 10, "peak_at": "forward"}}],
    "verdict": {"fits": True, "headroom_bytes": None},
    "assumptions": ["one", "two"],
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    report = copy.deepcopy(REPORT)
    change(report)
    return report


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report["ranks"][0]["memory"].update(peak_at="backward"),
        lambda report: report.update(assumptions=["three"]),
    ],
)
def test_text_may_change(change: Callable[[dict[str, Any]], object]) -> None:
    assert list(differences(REPORT, changed(change))) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda report: report["ranks"][0]["memory"].update(peak_allocated_bytes=11), ".ranks[0].memory.peak_allocated_bytes"),
        (lambda report: report["ranks"][0]["memory"].update(peak_allocated_bytes=10.0), ".ranks[0].memory.peak_allocated_bytes"),
        (lambda report: report["ranks"][0]["ranks"].append([8, 9]), ".ranks[0].ranks"),
        (lambda report: report["verdict"].update(fits=1), ".verdict.fits"),
        (lambda report: report["verdict"].pop("headroom_bytes"), ".verdict.headroom_bytes"),
        (lambda report: report.update(schema="training-info/2"), ".schema"),
        (lambda report: report.update(advice=[]), ".advice"),
    ],
)
def test_keys_numbers_and_identifiers_may_not_change(change: Callable[[dict[str, Any]], object], path: str) -> None:
    found = list(differences(REPORT, changed(change)))
    assert len(found) == 1
    assert found[0].startswith(f"{path}: ")


def test_the_reports_of_two_directories_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        (folder / "same.json").write_text(json.dumps(REPORT))
    (before / "other.json").write_text(json.dumps(REPORT))
    (after / "other.json").write_text(json.dumps(changed(lambda report: report["verdict"].update(fits=False))))
    (before / "gone.json").write_text("{}")
    assert compare(before, after) == 2
    printed = capsys.readouterr().out
    assert f"not in {after}" in printed
    assert ".verdict.fits: True before, False after" in printed
    assert "1 of 3 reports have equal keys and numbers" in printed
