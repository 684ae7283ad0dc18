"""Writes examples/expected/ anew, and README.md's part of it: what each script prints when its own `sed` line is run over it.

    python tools/update_examples.py

Read the difference before you commit it: tests/test_examples.py holds the output of every example against these files.
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
FIRST_SHOWN: Final = "── Memory of each rank"
WIDTH: Final = 100
"""Columns of the expected output."""


def sed_line(script: Path) -> str:
    """The command that stands in the opening comment of a script."""
    return next(line.removeprefix("#").strip() for line in script.read_text().splitlines() if line.startswith("#   sed "))


def expected_file(script: Path) -> Path:
    """Where the output of a script is kept."""
    return ROOT / "examples" / "expected" / f"{script.stem}.txt"


def run(command: str, *, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command line in `folder`; `python` is the one that runs this, and the environment holds nothing else."""
    with tempfile.TemporaryDirectory() as bare:
        python = Path(bare) / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        environ = {"PATH": f"{bare}:{os.environ.get('PATH', os.defpath)}", "HOME": bare, "COLUMNS": str(WIDTH)}
        return subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def shown_in_readme() -> str:
    """The part of the first example's output that the README shows: memory and the verdict."""
    output = expected_file(ROOT / "examples" / "pretrain_llama3_8b.sh").read_text()
    return output[output.index(FIRST_SHOWN) : output.index("── Communication of the cluster")].rstrip("\n") + "\n"


def main() -> None:
    for script in SCRIPTS:
        done = run(sed_line(script))
        if done.stderr:
            sys.exit(f"{script.name}: {done.stderr}")
        expected_file(script).write_text(done.stdout)
        print(f"{expected_file(script).relative_to(ROOT)}: {len(done.stdout.splitlines())} lines, exit {done.returncode}")
    readme = ROOT / "README.md"
    text = readme.read_text()
    begin = text.index(FIRST_SHOWN)
    end = text.index("```", begin)
    readme.write_text(text[:begin] + shown_in_readme() + text[end:])


if __name__ == "__main__":
    main()
