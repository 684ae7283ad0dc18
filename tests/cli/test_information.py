"""What is printed without a launch: `--version` and `--info-gpu list`."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import analyzer
from analyzer.cli.information import print_information
from analyzer.hardware.gpus import GPUS, find
from tests.command import assert_refused, run

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_that_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["version"] == "attr: analyzer.version.__version__"
    outcome = run("--version")
    assert (outcome.status, outcome.out, outcome.err) == (0, f"{config['metadata']['name']} {analyzer.__version__}\n", "")
    assert re.fullmatch(r"\d+\.\d+\.\d+", analyzer.__version__)
    assert f"\n## {analyzer.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_version_in_a_launch_is_a_word_of_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_information(["--nproc-per-node", "8", "pretrain_gpt.py", "--version"]) is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [("--info-gpu", "list"), ("--info-gpu=list",), ("pretrain_gpt.py", "--info-gpu", "list")])
def test_known_gpus_are_listed_with_their_memory(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    outcome = run(*words)
    assert (outcome.status, outcome.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in outcome.out.splitlines() if " GiB " in line}
    assert {*rows} == {gpu.name for gpu in GPUS}
    # cudaMemGetInfo of an H100 SXM, and NVIDIA's table of compute capabilities
    assert rows["H100-80GB"][1:4] == ["79.18", "GiB", "9.0"]
    assert rows["GB300-288GB"][3] == "10.3"
    listed = outcome.out.replace(",", " ").split()
    assert {alias for gpu in GPUS for alias in gpu.aliases} <= {*listed}


def test_each_listed_name_is_accepted() -> None:
    for line in run("--info-gpu", "list").out.splitlines():
        if found := re.match(r"  (\S+) +[\d.]+ GiB +[\d.]+ +\d+  ?(.*)", line):
            for name in (found[1], *filter(None, found[2].strip().split(", "))):
                assert find(name)[0].name == found[1]


def test_an_unknown_gpu_names_the_list() -> None:
    outcome = run("--info-gpu", "H1000", "pretrain_gpt.py")
    assert_refused(outcome, "--info-gpu")
    assert "--info-gpu list" in outcome.err


def test_the_published_models_are_listed() -> None:
    outcome = run("--info-model", "list")
    names = outcome.out.splitlines()
    assert (outcome.status, outcome.err, len(names)) == (0, "", len(set(names)))
    assert {"meta-llama/Llama-3.1-70B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"} <= {*names}
