"""Files that the options of the program name."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.cli.script import SUFFIXES
from analyzer.errors import InputError
from analyzer.launch.info_files import SCRIPTS, WRITTEN
from analyzer.launch.info_options import SCRIPT_ENDINGS, read_info_options
from analyzer.launch.parse import parse


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


@pytest.mark.parametrize("field", WRITTEN)
@pytest.mark.parametrize("name", ["pretrain_gpt.py", "train.sh", "job.SBATCH", "run.slurm", "train.zsh"])
def test_a_script_is_not_overwritten(tmp_path: Path, field: str, name: str) -> None:
    script, option = tmp_path / name, f"--info-{field}".replace("_", "-")
    assert read_info_options([(option, str(script))]), "a new file may have any name"
    script.write_text("torchrun pretrain_gpt.py")
    (tmp_path / "link.json").symlink_to(script)
    for path in (script, tmp_path / "link.json"):
        error = refused((option, str(path)))
        assert (error.option, "is a script" in error.fault) == (option, True)


def test_a_script_without_a_suffix_is_not_overwritten(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/bin/bash\ntorchrun pretrain_gpt.py\n")
    assert refused(("--info-json", str(script))).option == "--info-json"


def test_every_ending_of_a_launch_script_is_one_of_a_script() -> None:
    assert {*SUFFIXES, *SCRIPT_ENDINGS, ".py"} <= set(SCRIPTS)


@pytest.mark.parametrize("model", ["config.json", "."])
def test_the_file_of_the_model_is_not_overwritten(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for option in ("--info-json", "--info-html", "--info-timeline"):
        argv = ["--info-model", model, option, str(tmp_path / "config.json")]
        with pytest.raises(InputError, match=f"^{option}: .* is the file of the model.*; name another file") as caught:
            parse(argv, environ={}, folder=tmp_path)
        assert caught.value.option == option
