"""Writes the files of examples/expected/ and their part of README.md: the output of the command in each script.

    python tools/update_examples.py

Read the difference before you commit it: tests/cli/test_examples.py compares the output of every example with these files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPTS: Final = sorted((ROOT / "examples").glob("*.sh"))
FULL: Final = ROOT / "examples" / "pretrain_mixtral_8x7b.sh"
"""The script whose output is also kept with `--info-detail full`."""
SHOWN: Final = ROOT / "examples" / "pretrain_llama3_8b.sh"
"""The script whose output the README shows."""
WIDTH: Final = 100
"""Columns of the expected output."""


def command_of(script: Path) -> str:
    """The command in the opening comment of a script, which runs the program of this repository."""
    lines = script.read_text().splitlines()
    shown = next(line.removeprefix("#").strip() for line in lines if line.startswith("#   get-training-info "))
    return shown.replace("get-training-info", "python get_training_info.py", 1)


def expected_file(script: Path, *, full: bool = False) -> Path:
    """The file with the output of a script; `full`: with `--info-detail full`."""
    return ROOT / "examples" / "expected" / f"{script.stem}{'.full' if full else ''}.txt"


def commands() -> dict[Path, str]:
    """The command that writes each file of examples/expected/."""
    full = {expected_file(FULL, full=True): f"{command_of(FULL)} --info-detail full"}
    return {expected_file(script): command_of(script) for script in SCRIPTS} | full


def run(command: str, *, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command line in `folder`, with this Python as `python` and an otherwise empty environment."""
    with tempfile.TemporaryDirectory() as bare:
        python = Path(bare) / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        environ = {"PATH": f"{bare}:{os.environ.get('PATH', os.defpath)}", "HOME": bare, "COLUMNS": str(WIDTH)}
        return subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def shown_in_readme() -> str:
    """The output that the README shows: the verdict and the key figures."""
    return expected_file(SHOWN).read_text().partition("\n\n──")[0] + "\n"


def main() -> None:
    for file, command in commands().items():
        done = run(command)
        if done.stderr:
            sys.exit(f"{file.name}: {done.stderr}")
        file.write_text(done.stdout)
        print(f"{file.relative_to(ROOT)}: {len(done.stdout.splitlines())} lines, exit {done.returncode}")
    readme = ROOT / "README.md"
    text = readme.read_text()
    fence = "```\n"
    begin = text.index(fence, text.index(f"examples/expected/{expected_file(SHOWN).name}")) + len(fence)
    readme.write_text(text[:begin] + shown_in_readme() + text[text.index(fence, begin) :])


if __name__ == "__main__":
    main()
