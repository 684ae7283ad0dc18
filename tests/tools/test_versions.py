"""tools/versions.py: the counts of a run and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator_hook.packages import COVERED
from tools import versions
from tools.versions import RELEASES, TEST, Result, compare, main, result_of, table

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" /></testsuites>"""


def test_errors_count_as_differences() -> None:
    assert result_of("0.13.1", REPORT) == Result("0.13.1", agree=4, differ=3, skipped=3)


def test_the_table_has_one_row_for_each_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"transformer-engine": "2.11.0", "torch": "2.13.0"}.__getitem__)
    assert table([Result("0.13.1", 4, 3, 2)])[2:] == ["| 0.13.1 | 2.11.0 | 2.13.0 | 4 | 3 | 2 |"]


def test_every_covered_release_is_compared() -> None:
    assert {release.rpartition(".")[0] for release in RELEASES} >= set(COVERED["megatron-core"])
    assert (versions.ROOT / TEST).is_file()


@pytest.mark.parametrize(("release", "status"), [("0.16.1", 1), ("0.8.0", 0)])
def test_differences_of_a_covered_release_are_an_error(monkeypatch: pytest.MonkeyPatch, release: str, status: int) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "1")
    monkeypatch.setattr(versions, "compare", lambda release, **_: Result(release, agree=0, differ=1, skipped=0))
    assert main([release]) == status


def test_the_tests_run_with_the_folder_of_the_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> None:
        ran.append(env["PYTHONPATH"])
        xml = next(word for word in command if word.startswith("--junitxml=")).partition("=")[2]
        Path(xml).write_text(REPORT)

    (tmp_path / "megatron-core-0.12.3" / "megatron" / "core").mkdir(parents=True)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("subprocess.run", run)
    assert compare("0.12.3").differ == 3
    assert ran == [str(tmp_path / "megatron-core-0.12.3")]
