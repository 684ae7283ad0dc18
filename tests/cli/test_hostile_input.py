"""Input that no user writes on purpose: exit status 2 with one line, and no internal error."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Outcome, assert_refused, run

PROGRAM = Path(__file__).resolve().parents[2] / "get_training_info.py"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
).split()
WORLD = ["--info-world-size", "8", "--info-gpu-memory", "80GiB"]
VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
BASE = (*WORLD, *MODEL, *VOCABULARY)
LONG_NAME = "a" * 300


def shell(arguments: list[str] | tuple[str, ...], redirection: str = "", *, folder: Path, **variables: str) -> Outcome:
    """Runs the program in a shell, in `folder`."""
    command = shlex.join([sys.executable, str(PROGRAM), *arguments])
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirection}"],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", LONG_NAME),
        ("--tokenizer-type", "GPT2BPETokenizer", "--merge-file", "m", "--vocab-file", LONG_NAME),
        (*VOCABULARY, "--info-megatron", LONG_NAME),
        (*VOCABULARY, "--info-model", LONG_NAME),
        (*VOCABULARY, "--info-against", LONG_NAME),
        (*VOCABULARY, "--info-check", LONG_NAME),
    ],
)
def test_a_name_longer_than_file_systems_allow_is_refused(arguments: tuple[str, ...]) -> None:
    outcome = run(*WORLD, *MODEL, *arguments)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert "File name too long" in outcome.err


@pytest.mark.parametrize("word", ["--info-x\x1b[2J\ny", "a\nb\x1b\r.sh"])
def test_control_characters_are_escaped(word: str) -> None:
    outcome = run(*BASE, word) if word.startswith("-") else run(word)
    assert outcome.status == 2
    line, newline, rest = outcome.err.partition("\n")
    assert newline
    assert not rest
    assert line.isprintable()
    assert "\\x1b" in line
    assert "\\n" in line


def test_a_long_word_is_shortened_in_the_error() -> None:
    outcome = run(*BASE, "--num-layers", "9" * 5000)
    assert_refused(outcome, "--num-layers")
    assert len(outcome.err) < 500


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("--info-gpu", "list"), BASE, (*BASE, "--info-json", "-"), ("launch.sh", "--info-dry")],
    ids=["help", "version", "gpus", "report", "json", "dry"],
)
def test_a_closed_or_full_standard_output_is_an_error(arguments: tuple[str, ...], redirection: str, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(shlex.join(["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *MODEL, *VOCABULARY]))
    outcome = shell(arguments, redirection, folder=tmp_path)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("get_training_info: standard output: ")


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
def test_a_deleted_working_folder_is_refused(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, str(PROGRAM), *BASE])
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(["bash", "-c", f"rmdir {gone}; {command}"], cwd=gone, capture_output=True, text=True, check=False)
    assert_refused(Outcome(done.returncode, done.stdout, done.stderr), "the")
    assert "working folder" in done.stderr


@pytest.mark.slow
def test_an_interrupt_ends_with_one_line() -> None:
    code = "import os, signal, get_training_info as program\n"
    code += f"program.main = lambda: os.kill(os.getpid(), {int(signal.SIGINT)})\nraise SystemExit(program.program())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "get_training_info: interrupted\n"
