"""Input that no user writes on purpose: exit status 2 with one line, and no internal error."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.hostile_cases import cases, create_files, expanded, make_accessible, words_of
from tests.command import Outcome, assert_refused, run

PROGRAM = Path(__file__).resolve().parents[2] / "get_training_info.py"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
).split()
WORLD = ["--info-world-size", "8", "--info-gpu-memory", "80GiB"]
VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
BASE = (*WORLD, *MODEL, *VOCABULARY)


def shell(arguments: list[str] | tuple[str, ...], line: str = "{program}", *, folder: Path, **variables: str) -> Outcome:
    """Runs `line` in a shell in `folder`; `{program}` is the program with its arguments."""
    command = shlex.join([sys.executable, str(PROGRAM), *arguments])
    done = subprocess.run(
        ["bash", "-c", line.replace("{program}", command)],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode())


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the variables that the cases set."""
    monkeypatch.setattr("analyzer.hardware.gpus.DRIVER_FILES", ())
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case["name"], marks=[pytest.mark.slow] if "shell" in case else []) for case in cases()],
)
def test_a_hostile_input_gives_a_report_or_one_line(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.get("unprivileged") and os.geteuid() == 0:
        pytest.skip("this user reads every file")
    for name, value in case.get("environment", {}).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, expanded(value, tmp_path))
    words = words_of(case, tmp_path)
    working = tmp_path / case.get("working_folder", "")

    if "shell" in case:
        create_files(case, tmp_path)
        outcome = shell(words, case["shell"], folder=working)
    else:
        working.mkdir(exist_ok=True)
        monkeypatch.chdir(working)
        try:
            create_files(case, tmp_path)
            outcome = run(*words)
        finally:
            make_accessible(case, tmp_path)
    assert outcome.status == case["status"], outcome
    assert outcome.err.count("\n") == (case["status"] == 2)
    assert outcome.err.rstrip("\n").isprintable()
    assert expanded(case["message"], tmp_path) in outcome.err


def test_a_long_word_is_shortened_in_the_error() -> None:
    outcome = run(*BASE, "--num-layers", "9" * 5000)
    assert_refused(outcome, "--num-layers")
    assert len(outcome.err) < 500


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_the_json_report_is_the_same_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    outcomes = [shell([*BASE, "--info-json", "-"], folder=tmp_path, PYTHONIOENCODING=name) for name in (encoding, "utf-8")]
    assert [outcome.status for outcome in outcomes] == [0, 0]
    other, usual = (outcome.out.encode("latin-1") for outcome in outcomes)
    assert not usual.isascii()
    assert json.loads(other.decode(encoding)) == json.loads(usual)


@pytest.mark.slow
def test_the_report_is_printed_in_an_ascii_locale(tmp_path: Path) -> None:
    outcome = shell([*BASE, "--info-detail", "full"], folder=tmp_path, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert outcome.status == 0
    assert outcome.err == ""
    assert outcome.out.isascii()


@pytest.mark.slow
def test_an_interrupt_ends_with_one_line() -> None:
    code = "import os, analyzer.cli.main as cli, get_training_info as program\n"
    code += f"cli._run = lambda _: os.kill(os.getpid(), {int(signal.SIGINT)})\nraise SystemExit(program.program())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "get-training-info: interrupted\n"


def checkout(folder: Path, parser: bytes) -> Path:
    """A checkout of Megatron-LM with this parser."""
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "core").mkdir()
    (folder / "megatron" / "training" / "arguments.py").write_bytes(parser)
    (folder / "megatron" / "core" / "package_info.py").write_bytes(b"# \xff\xfe\nMAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    return folder


@pytest.mark.slow
def test_output_of_a_parser_that_is_not_utf_8_is_part_of_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parser = b'import sys\nsys.stderr.buffer.write(b"\\xff\\xfe wrong")\nsys.stderr.flush()\nimport os\nos._exit(3)\n'
    outcome = run(*BASE, "--info-megatron", str(checkout(tmp_path, parser)))
    assert_refused(outcome, "--info-megatron")
    assert "wrong" in outcome.err


@pytest.mark.parametrize(
    "variables",
    [
        # without the cache, the library that isolates scripts is compiled again
        pytest.param({"HOME": None}, id="no home", marks=pytest.mark.slow),
        pytest.param({"HOME": "/dev/null"}, id="home", marks=pytest.mark.slow),
        pytest.param({"XDG_CACHE_HOME": "/dev/null/cache"}, id="cache", marks=pytest.mark.slow),
        pytest.param({"HF_HOME": "/dev/null"}, id="hub"),
    ],
)
def test_folders_of_the_user_are_not_needed(
    variables: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    script = tmp_path / "launch.sh"
    script.write_text(shlex.join(["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *MODEL, *VOCABULARY]))
    outcome = run(str(script), "--info-gpu-memory", "80GiB")
    assert outcome.status == 0, outcome.err
    assert outcome.err == ""
    outcome = run(*WORLD, *MODEL, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "someone/some-model")
    assert outcome.status == 0, outcome.err
