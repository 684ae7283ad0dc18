"""tools/versions.py: the counts of a run, the table, and the packages of a pair of releases."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allocator_hook.packages import COVERED
from tools import versions
from tools.versions import CORE, PAIRS, TE, TEST, Pair, Result, compare, main, result_of, table

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" /></testsuites>"""
INSTALLED = {"megatron-core": "0.16.1", "transformer-engine": "2.11.0", "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", INSTALLED.__getitem__)


def test_errors_count_as_differences() -> None:
    assert result_of(Pair("0.13.1", "2.11.0"), REPORT) == Result(Pair("0.13.1", "2.11.0"), agree=4, differ=3, skipped=3)


def test_the_table_has_one_row_for_each_pair() -> None:
    assert table([Result(Pair("0.14.0", "2.3.0"), 4, 3, 2)])[2:] == ["| 0.14.0 | 2.3.0 | 2.13.0 | 4 | 3 | 2 |"]


def test_a_pair_without_transformer_engine_uses_the_installed_one() -> None:
    assert Pair.of("0.13.1") == Pair("0.13.1", "2.11.0")
    assert Pair.of("0.13.1:2.6.0") == Pair("0.13.1", "2.6.0")


def test_a_checkout_has_the_release_of_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    pair = Pair.of(f"{tmp_path}:2.11.0")
    assert pair == Pair("0.18.2", "2.11.0", tmp_path)
    ran = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> None:
        ran.append(env["PYTHONPATH"])
        Path(next(word for word in command if word.startswith("--junitxml=")).partition("=")[2]).write_text(REPORT)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert compare(pair).differ == 3
    assert ran == [str(tmp_path)]


def test_every_covered_release_is_compared() -> None:
    pairs = [Pair.of(pair) for pair in PAIRS]
    assert {pair.core.rpartition(".")[0] for pair in pairs} >= set(COVERED[CORE])
    assert {pair.te.rpartition(".")[0] for pair in pairs} >= set(COVERED[TE])
    assert (versions.ROOT / TEST).is_file()


@pytest.mark.parametrize(("pair", "status"), [("0.16.1:2.11.0", 1), ("0.8.0:2.11.0", 0), ("0.16.1:2.4.0", 0)])
def test_differences_of_covered_releases_are_an_error(monkeypatch: pytest.MonkeyPatch, pair: str, status: int) -> None:
    monkeypatch.setattr(versions, "compare", lambda pair, **_: Result(pair, agree=0, differ=1, skipped=0))
    assert main([pair]) == status


@pytest.mark.parametrize(
    ("pair", "folders"),
    [
        ("0.12.3:2.11.0", ["megatron-core-0.12.3"]),
        ("0.16.1:2.20.2", ["transformer-engine-2.20.2"]),
        ("0.12.3:2.1.0", ["transformer-engine-2.1.0", "megatron-core-0.12.3"]),
    ],
)
def test_the_tests_run_with_the_folders_of_other_releases(
    pair: str, folders: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = []

    def run(command: list[str], *, env: dict[str, str] | None = None, **_: object) -> None:
        assert env is not None, f"installs again: {command}"
        ran.append(env["PYTHONPATH"])
        xml = next(word for word in command if word.startswith("--junitxml=")).partition("=")[2]
        Path(xml).write_text(REPORT)

    for folder in folders:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "another torch")
    monkeypatch.setattr("subprocess.run", run)
    assert compare(Pair.of(pair)).differ == 3
    assert ran == [os.pathsep.join([*(str(tmp_path / folder) for folder in folders), "another torch"])]


def test_a_missing_release_is_installed_without_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("subprocess.run", lambda command, **_: ran.append(command))
    assert versions.install(TE, "2.3.0") == tmp_path / "transformer-engine-2.3.0"
    assert "--no-deps" in ran[0]
    assert ran[0][-1] == "transformer-engine==2.3.0"
    assert versions.install(TE, "2.11.0") is None
