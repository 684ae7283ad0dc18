"""Installs a wheel with each Python from 3.11 to 3.14 that is found, and runs the installed command outside of the repository.

    python tools/try_wheel.py dist/get_training_info-0.2.0-py3-none-any.whl

Interpreters that are missing are named and left out. The exit status is 1 if a command of the wheel fails, or without interpreters.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
COMMANDS: Final = (
    ("--version",),
    ("fit", str(ROOT / "examples" / "pretrain_llama3_8b.sh"), "--gpu", "H100-80GB", "--detail", "line"),
    ("models",),
    (
        "serve",
        "meta-llama/Llama-3.1-8B",
        "--gpu",
        "H100-80GB",
        "--gpus",
        "1",
        "--batch",
        "1",
        "--prompt",
        "128",
        "--generate",
        "16",
    ),
)
"""Words after the installed command. They read the data files of most packages."""


def interpreter(version: str) -> str | None:
    """The path of a Python of this version that runs; None without one."""
    name = f"python{version}"
    found = shutil.which(name)
    if found is None:
        return None
    return found if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0 else None


def fault_of(python: str, wheel: Path) -> str:
    """What fails with a wheel, as one line; empty if nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        steps = [
            [python, "-m", "venv", str(environment)],
            [str(environment / "bin" / "pip"), "install", "--quiet", str(wheel)],
            *([str(environment / "bin" / "get-training-info"), *words] for words in COMMANDS),
        ]
        for step in steps:
            done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                return (
                    f"{' '.join(step[1:3])}: exit status {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}"
                )
    return ""


def main(argv: list[str]) -> int:
    """Tries the wheel that `argv` names. Returns the exit status."""
    if len(argv) != 1 or not Path(argv[0]).is_file():
        print("name a wheel: python tools/try_wheel.py dist/NAME.whl", file=sys.stderr)
        return 2
    tried = {}
    for version in VERSIONS:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not found")
            continue
        tried[version] = fault_of(python, Path(argv[0]).resolve())
        print(f"Python {version}: {tried[version] or 'all commands work'}", flush=True)
    return 1 if not tried or any(tried.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
