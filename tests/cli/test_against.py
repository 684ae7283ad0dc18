"""`--info-against`: the changes after the console report and in the JSON report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import assert_refused, report, run
from tests.job_of import BASE
from tests.report.printed import section, titles

LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64", "--info-gpu", "H100-80GB")


@pytest.fixture
def old(tmp_path: Path) -> str:
    file = str(tmp_path / "old.json")
    assert run(*LAUNCH, "--info-json", file).status == 0
    return file


def test_the_same_launch_has_no_changes(old: str) -> None:
    assert report(*LAUNCH, "--info-against", old)["against"] == {"file": old, "changed": False}
    outcome = run(*LAUNCH, "--info-against", old)
    assert (outcome.status, outcome.err) == (0, "")
    assert titles(outcome.out)[-1].startswith("Changes since ")
    assert outcome.out.endswith("  Nothing changed.\n")
    assert "against" not in report(*LAUNCH)


def test_full_recomputation_changes_the_saved_activations_and_the_time(old: str) -> None:
    """Recomputation of every layer keeps model states and calls of data-parallel groups. Its forwards take time."""
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    changes = report(*LAUNCH, *words.split(), "--info-against", old)["against"]
    assert changes["changed"] is True
    fields = [row["field"].rpartition(".")[2] for row in changes["memory"]]
    assert fields[0] == "activations_bytes"
    assert changes["memory"][0]["difference"] < 0
    assert {"parameters_bytes", "gradients_bytes", "optimizer_bytes"}.isdisjoint(fields)
    assert {*changes} == {"file", "changed", "verdict", "memory", "time"}
    times = {row["field"]: row["difference"] for row in changes["time"]}
    assert times["time.parts_seconds.attention"] > 0
    assert times["time.iteration_seconds"] > 0 > times["time.tokens_per_second_per_gpu"]
    printed = section(run(*LAUNCH, *words.split(), "--info-against", old).out, "Changes since")
    assert any("saved activations" in line for line in printed)


def test_several_reports_are_compared_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console has a section for each; the JSON report has the changes since the first one."""
    monkeypatch.chdir(tmp_path)
    run(*LAUNCH, "--info-json", "a.json")
    run(*LAUNCH, "--micro-batch-size", "2", "--info-json", "b.json")
    both = ("--info-against", "b.json", "--info-against", "a.json")
    outcome = run(*LAUNCH, *both)
    found = [title for title in titles(outcome.out) if title.startswith("Changes since")]
    assert found == ["Changes since b.json", "Changes since a.json"]
    against = report(*LAUNCH, *both)["against"]
    assert (against["file"], against["changed"]) == ("b.json", True)


def test_the_old_report_may_be_replaced_by_the_new_one(old: str) -> None:
    before = Path(old).read_text()
    outcome = run(*LAUNCH, "--micro-batch-size", "2", "--info-against", old, "--info-json", old)
    assert (outcome.status, outcome.err) == (0, "")
    assert "micro-batch size" in outcome.out
    assert Path(old).read_text() != before
    assert '"against": ' in Path(old).read_text()
    assert run(*LAUNCH, "--micro-batch-size", "2", "--info-against", old).out.endswith("  Nothing changed.\n")


def test_an_unreadable_report_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    written = tmp_path / "new.json"
    outcome = run(*LAUNCH, "--info-against", str(tmp_path / "missing.json"), "--info-json", str(written))
    assert_refused(outcome, "--info-against")
    assert not written.exists()
