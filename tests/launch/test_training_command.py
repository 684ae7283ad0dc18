"""`--info-launch`: the training starts with the given command line, and only if the launch fits."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.training_command import training_command

SHIM = Path(__file__).parents[2] / "get_training_info.py"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 999"
).split()


def test_info_options_are_removed_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    argv = ["--nproc-per-node", "8", "--info-gpu", "H100", "pretrain_gpt.py", "--num-layers", "2", "--info-launch", "--bf16"]
    assert training_command(argv, folder=tmp_path) == [
        "torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--num-layers", "2", "--bf16",
    ]  # fmt: skip


def test_a_missing_script_is_replaced_by_pretrain_gpt(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    command = training_command(["--nnodes=2", "--nproc-per-node", "8", "--bf16"], folder=tmp_path)
    assert command == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "pretrain_gpt.py", "--bf16"]


def test_without_torchrun_options_python_runs_the_script(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    assert training_command(["pretrain_gpt.py", "--bf16"], folder=tmp_path) == [sys.executable, "-u", "pretrain_gpt.py", "--bf16"]


def test_a_script_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no pretrain_gpt\.py"):
        training_command(["--nproc-per-node", "8", "--bf16"], folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "status", "started"), [("80GiB", 7, True), ("10MiB", 1, False)])
def test_training_starts_only_if_it_fits(tmp_path: Path, memory: str, status: int, started: bool) -> None:
    """A substitute for torchrun writes its arguments to a file and exits with status 7, which the program returns."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@" > started\nexit 7\n')
    torchrun.chmod(torchrun.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "pretrain_gpt.py").touch()
    done = subprocess.run(
        [sys.executable, str(SHIM), "--nproc-per-node", "1", *MODEL, "--info-gpu-memory", memory, "--info-launch"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "started").exists() == started
    if started:
        assert (tmp_path / "started").read_text().split() == ["--nproc-per-node", "1", "pretrain_gpt.py", *MODEL]


@pytest.mark.slow
def test_training_does_not_start_without_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    done = subprocess.run(
        [sys.executable, str(SHIM), "--nproc-per-node", "1", *MODEL, "--info-launch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--info-gpu" in done.stderr
