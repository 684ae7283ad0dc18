"""Files that the options of the program name."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.info_options import read_info_options


def refused(*pairs: tuple[str, str]) -> InputError:
    with pytest.raises(InputError) as caught:
        read_info_options(pairs)
    return caught.value


def test_two_options_cannot_write_one_file(tmp_path: Path) -> None:
    file = str(tmp_path / "report")
    for first, second in (("--info-json", "--info-html"), ("--info-html", "--info-timeline"), ("--info-json", "--info-search-csv")):
        error = refused((first, file), (second, str(tmp_path / "none" / ".." / "report")))
        assert {error.option} | {first, second} == {first, second}
        assert "is also the file of" in error.fault


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "report.html")
    assert refused(("--info-html", str(tmp_path / "report.html")), ("--info-json", str(tmp_path / "link.json")))


def test_a_page_cannot_replace_an_older_report_and_a_json_report_can(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    assert refused(("--info-against", str(old)), ("--info-html", str(old))).option == "--info-html"
    assert refused(("--info-against", str(old)), ("--info-json", str(old)), ("--info-html", str(old))).option == "--info-html"
    assert read_info_options([("--info-against", str(old)), ("--info-json", str(old))]).json == str(old)


def test_a_device_can_be_named_twice() -> None:
    assert read_info_options([("--info-html", "/dev/null"), ("--info-json", "/dev/null")]).html == "/dev/null"


@pytest.mark.parametrize("option", ["--info-html", "--info-timeline"])
def test_a_page_is_not_written_to_standard_output(option: str) -> None:
    assert refused((option, "-")).option == option
