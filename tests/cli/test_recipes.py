"""The recipes of docs/howto/ci.md and docs/howto/slurm.md do what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.job_of import BASE
from tools.doc_commands import CACHE

ROOT = Path(__file__).resolve().parents[2]
PAGES = "".join((ROOT / "docs" / "howto" / name).read_text() for name in ("ci.md", "slurm.md"))
BLOCKS = re.findall(r"```(yaml|bash)\n(.*?)```", PAGES, re.DOTALL)
FITS = f"torchrun --nproc-per-node 8 pretrain_gpt.py {BASE} --global-batch-size 64\n"
TOO_LARGE = FITS.replace("\n", " --num-layers 512\n")


def block(text: str) -> str:
    """The only block with a text."""
    (found,) = [content for _, content in BLOCKS if text in content]
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with launch scripts, and programs that stand for the installed command, sbatch and srun."""
    programs = {
        "get-training-info": f'exec "{sys.executable}" {ROOT}/get_training_info.py "$@"',
        "sbatch": 'echo "submitted $@"',
        "srun": 'echo "started $@"',
    }
    (tmp_path / "bin").mkdir()
    for name, command in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o755)
    (tmp_path / "launch").mkdir()
    for name, launch in (("train.sh", FITS), ("large.sh", TOO_LARGE), ("data.sh", "echo prepare\n")):
        (tmp_path / "launch" / name).write_text(f"#!/bin/bash\n{launch}")
    return tmp_path


def bash(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}", "HOME": str(folder)}
    environ |= {"XDG_CACHE_HOME": CACHE, **variables}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_hook_of_a_commit_names_the_script_that_does_not_fit(folder: Path) -> None:
    (hook,) = yaml.safe_load(block("repos:"))["repos"][0]["hooks"]
    assert re.search(hook["files"], "launch/train.sh")
    assert bash(folder, f"{hook['entry']} launch/train.sh").returncode == 0
    found = bash(folder, f"{hook['entry']} launch/large.sh launch/train.sh")
    assert found.returncode == 1
    first, second = found.stdout.splitlines()
    assert (first.partition(":")[0], second.partition(":")[0]) == ("It does not fit", "It fits")


@pytest.mark.slow
def test_sbatch_submits_what_fits(folder: Path) -> None:
    function = block("sbatch() {")
    assert "submitted --nodes 1 launch/train.sh" in bash(folder, f"{function}\nsbatch --nodes 1 launch/train.sh").stdout
    refused = bash(folder, f"{function}\nsbatch launch/large.sh")
    assert (refused.returncode, "submitted" in refused.stdout) == (1, False)
    assert "submitted" in bash(folder, f"{function}\nsbatch launch/large.sh", UNCHECKED="1").stdout
    assert bash(folder, f"{function}\nsbatch launch/data.sh").stdout == "submitted launch/data.sh\n"


@pytest.mark.slow
def test_a_job_that_does_not_fit_ends_before_it_starts(folder: Path) -> None:
    job = block("srun bash launch/train.sh")
    assert "started bash launch/train.sh" in bash(folder, job).stdout
    (folder / "launch" / "large.sh").replace(folder / "launch" / "train.sh")
    ended = bash(folder, job)
    assert (ended.returncode, "started" in ended.stdout) == (1, False)


@pytest.mark.slow
def test_a_pull_request_is_compared_with_its_target(folder: Path) -> None:
    commands = block("git show").replace("git show origin/main:launch/train.sh", "sed s/64/128/ launch/train.sh")
    found = bash(folder, f"set -e\n{commands}")
    assert found.returncode == 0, found.stderr
    assert "global batch size" in found.stdout
    assert (folder / "report.json").is_file()
