"""The command in the page of `--info-html`. The page itself is tested in tests/report/html."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import run
from tests.report.html.pages import embedded

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000"
)


def command_of(page: Path) -> str:
    """The command in the last element of the page."""
    return html.unescape(re.sub("<.+?>", "", page.read_text().rpartition("<code>")[2].partition("</code>")[0]))


def content(page: Path) -> str:
    """The page with the compressed documents in it."""
    text = page.read_text()
    return text + embedded(text, "reports") + embedded(text, "extra")


def variables_of(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return dict(word.split("=", 1) for word in words[: words.index("get-training-info")])


def test_the_command_has_the_variables_that_the_prediction_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the same page again in an environment without them. Other variables are not in the page."""
    for name, value in (
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("NNODES", "1"),
        ("NPROC_PER_NODE", "4"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("MY_TOKEN", "a secret value"),
        ("HF_TOKEN", "a secret value"),
    ):
        monkeypatch.setenv(name, value)
    page = tmp_path / "page.html"
    assert run("pretrain_gpt.py", *OPTIONS.split(), "--info-html", str(page)).status == 0
    text, command = content(page), command_of(page)
    assert "secret" not in text
    found = variables_of(command)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert (found["NNODES"], found["NPROC_PER_NODE"]) == ("1", "4")
    assert not {"HOME", "PATH", "MY_TOKEN", "HF_TOKEN"} & set(found)
    again = command.replace("get-training-info", shlex.join([sys.executable, str(ROOT / "get_training_info.py")]))
    page.unlink()
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", again], check=False, capture_output=True, text=True, env=plain, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert variables_of(command_of(page)) | {"PYTHONPATH": ""} == found | {"PYTHONPATH": ""}


def test_the_command_has_the_variables_of_a_script(tmp_path: Path) -> None:
    """Variables that the script sets and those of #SBATCH lines."""
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4\n"
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PASSWORD=secret-word\n"
        f"srun python pretrain_gpt.py {OPTIONS}\n"
    )
    page = tmp_path / "page.html"
    outcome = run(str(script), "--info-html", str(page))
    assert outcome.status == 0, outcome.err
    found = variables_of(command_of(page))
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert (found["SLURM_STEP_NUM_TASKS"], found["SLURM_NTASKS_PER_NODE"]) == ("8", "4")
    assert "secret-word" not in content(page)
