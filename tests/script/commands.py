"""Runs get_training_info.py on launch scripts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.doc_commands import CACHE

PROGRAM = Path(__file__).parents[2] / "get_training_info.py"
SCRIPTS = Path(__file__).parent / "scripts"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 999"
)
LAUNCH = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL}"
"""A launch that fits on any GPU."""


def run(
    script: Path, *words: str, folder: Path, environ: Mapping[str, str] | None = None, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the program on a script with `words` after it. The environment has no variables of a scheduler.

    The cache is that of the user: it has the library that isolates scripts, which would be compiled for each test.
    """
    own = {
        "PATH": ":".join([*map(str, path), f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"]),
        "HOME": str(folder),
        "XDG_CACHE_HOME": CACHE,
    }
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(script), *words],
        cwd=folder, env={**own, **(environ or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def run_text(
    text: str, *words: str, folder: Path, environ: Mapping[str, str] | None = None, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the program on a script with the text `text`, which is launch.sh in `folder`."""
    script = folder / "launch.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    return run(script, *words, folder=folder, environ=environ, path=path)


def script_output(text: str) -> str:
    """Standard error without the last line, in which the program says what ran."""
    return "".join(line for line in text.splitlines(keepends=True) if " of the script ran " not in line)


@dataclass(frozen=True)
class Printed:
    """One launch in the output of --info-dry."""

    shape: tuple[int, int] | None
    """Nodes and GPUs per node; None if they are unknown."""
    comment: str
    words: tuple[str, ...]

    def value(self, option: str) -> str:
        """The word after `option`."""
        return self.words[self.words.index(option) + 1]


def printed(output: str) -> list[Printed]:
    """The launches in the output of --info-dry, which has two lines for each."""
    lines = output.splitlines()
    launches: list[Printed] = []
    for comment, command in zip(lines[::2], lines[1::2], strict=True):
        assert comment.startswith(f"# launch {len(launches) + 1} of {len(lines) // 2}: ")
        size = re.search(r"; (\d+) GPUs? \((\d+) nodes? of (\d+)\); in /", comment)
        shape = None
        if size is not None:
            shape = (int(size[2]), int(size[3]))
            assert int(size[1]) == shape[0] * shape[1]
        launches.append(Printed(shape, comment, tuple(shlex.split(command))))
    return launches


def executable(path: Path, text: str) -> Path:
    """Writes a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
