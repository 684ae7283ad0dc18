"""Input that no user writes on purpose: exit status 2 with one line, and no internal error."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
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
    code = "import os, analyzer.cli.main as cli, get_training_info as program\n"
    code += f"cli._run = lambda _: os.kill(os.getpid(), {int(signal.SIGINT)})\nraise SystemExit(program.program())"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "get_training_info: interrupted\n"


@pytest.mark.parametrize("option", ["--info-world-size", "--info-gpus-per-node", "--info-layers", "--info-rank", "--num-experts"])
def test_a_number_of_thousands_of_digits_is_refused(option: str) -> None:
    assert_refused(run(*BASE, option, "9" * 5000), option)


def test_a_number_of_processes_of_thousands_of_digits_is_refused() -> None:
    assert_refused(run("--nnodes", "1", "--nproc-per-node", "9" * 5000, *MODEL, *VOCABULARY), "--nproc-per-node")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-layers", 10**30),
        ("--num-layers", 10**9),
        ("--num-experts", 10**30),
        ("--num-experts", 10**6),
        ("--hidden-size", 10**9),
        ("--vocab-size", 10**30),
        ("--nproc-per-node", 10**30),
    ],
)
def test_a_size_far_above_that_of_any_model_is_refused(option: str, value: int) -> None:
    arguments = BASE if option != "--nproc-per-node" else (*MODEL, *VOCABULARY)
    assert_refused(run(*arguments, option, str(value)), option)


@pytest.mark.parametrize("size", ["1e400GiB", "nanGiB", "9" * 5000 + "GiB"])
def test_a_memory_size_that_is_not_finite_is_refused(size: str) -> None:
    assert_refused(run(*BASE, "--info-gpu-memory", size), "--info-gpu-memory")


@pytest.mark.parametrize("value", ["abc", "-1", "9" * 5000])
def test_an_invalid_setting_of_the_allocator_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"max_split_size_mb:{value}")
    assert_refused(run(*BASE), "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("option", ["--heterogeneous-layers-config-path", "--tokenizer-model", "--info-against", "--info-model"])
def test_deeply_nested_json_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    tokenizer = VOCABULARY if option != "--tokenizer-model" else ["--tokenizer-type", "HuggingFaceTokenizer"]
    model = () if option == "--info-model" else MODEL
    assert_refused(run(*WORLD, *model, *tokenizer, option, str(tmp_path / "deep.json")), option)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"9" * 5000])
def test_a_tracker_file_without_an_iteration_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    assert_refused(run(*BASE, "--use-checkpoint-args", "--load", str(tmp_path)), "--use-checkpoint-args")


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


@pytest.mark.parametrize("special", ["/dev/zero", "pipe"])
@pytest.mark.parametrize("option", ["--heterogeneous-layers-config-path", "--info-against", "--info-check", "--info-model"])
def test_devices_and_pipes_are_refused(option: str, special: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    model = () if option == "--info-model" else (*MODEL, *VOCABULARY)
    assert_refused(run(*WORLD, *model, option, str(tmp_path / special)), option)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "pipe.sh"])
def test_a_launch_script_that_is_a_device_or_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.sh")
    outcome = run(str(tmp_path / name))
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1


def test_a_pipe_as_tracker_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    assert_refused(run(*BASE, "--use-checkpoint-args", "--load", str(tmp_path)), "--use-checkpoint-args")


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A folder without permissions that contains the file `file.json`, and beside it the file `file.sh` without permissions."""
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "file.json").write_text("{}")
    (tmp_path / "file.sh").write_text("torchrun pretrain_gpt.py\n")
    (tmp_path / "file.sh").chmod(0)
    folder.chmod(0)
    if os.access(folder / "file.json", os.R_OK):
        pytest.skip("this user reads every file")
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize("name", ["", "file.json"])
@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SFTTokenizer"])
def test_an_unreadable_tokenizer_is_refused(kind: str, name: str, secret: Path) -> None:
    outcome = run(*WORLD, *MODEL, "--tokenizer-type", kind, "--tokenizer-model", str(secret / name))
    assert_refused(outcome, "--tokenizer-model")
    assert "Permission denied" in outcome.err


def test_an_unreadable_vocabulary_is_refused(secret: Path) -> None:
    vocabulary = str(secret / "file.json")
    outcome = run(*WORLD, *MODEL, "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", "m", "--vocab-file", vocabulary)
    assert_refused(outcome, "--vocab-file")


def test_an_unreadable_folder_of_megatron_is_refused(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout_outcome = run(*BASE, "--info-megatron", str(secret))
    assert_refused(checkout_outcome, str(secret / "megatron/training/arguments.py"))
    monkeypatch.setenv("PYTHONPATH", str(secret))
    assert_refused(run(*BASE), str(secret))


def test_an_unreadable_working_folder_is_refused(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret.chmod(0o700)
    monkeypatch.chdir(secret)
    secret.chmod(0)
    assert_refused(run(*BASE), str(secret))


def test_an_unreadable_script_is_refused(secret: Path, tmp_path: Path) -> None:
    for script in (secret / "file.sh", tmp_path / "file.sh"):
        assert_refused(run(str(script)), str(script))


@pytest.mark.parametrize(
    "variables",
    [{"HOME": None}, {"HOME": "/dev/null"}, {"XDG_CACHE_HOME": "/dev/null/cache"}, {"HF_HOME": "/dev/null"}],
    ids=["no home", "home", "cache", "hub"],
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


@pytest.mark.parametrize("special", ["/dev/zero", "pipe"])
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("HuggingFaceTokenizer", "--tokenizer-model"),
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("GPT2BPETokenizer", "--vocab-file"),
    ],
)
def test_a_tokenizer_that_is_a_device_or_a_pipe_is_refused(kind: str, option: str, special: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused(run(*WORLD, *MODEL, "--tokenizer-type", kind, option, str(tmp_path / special)), option)
