"""Write the JSON reports of the example scripts and of the measured runs to a directory, for tools/compare_reports.py.

python tools/write_reports.py FOLDER [--root CHECKOUT]

`--root` runs the program of another checkout, for example of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Command:
    """A launch and the name of its report."""

    name: str
    words: tuple[str, ...]
    environ: dict[str, str]


def example_commands(root: Path) -> Iterator[Command]:
    """Yield the launches of examples/*.sh, on the GPU named in the opening comment of each script."""
    for script in sorted((root / "examples").glob("*.sh")):
        text = script.read_text()
        printed = re.sub(r"^torchrun ", "printf '%s\\\\0' ", text, flags=re.MULTILINE)
        done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
        gpu = re.search(r"--info-gpu (\S+)", text)
        words = (*done.stdout.rstrip("\0").split("\0"), *(("--info-gpu", gpu.group(1)) if gpu else ()))
        yield Command(script.stem, words, {})


def measured_commands(folder: Path) -> Iterator[Command]:
    """Yield the launches of tests/data/measured on their GPUs, with the Megatron release if it is known."""
    for file in sorted(folder.glob("*.json")):
        for record in json.loads(file.read_text()):
            world = ("--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]))
            release = record.get("megatron_release")
            info = ("--info-gpu", record["gpu"], *(("--info-megatron", release) if release else ()))
            yield Command(record["id"].replace("/", "-"), (*world, *record["argv"], *info), record["env"])


def write(command: Command, *, root: Path, folder: Path) -> str:
    """Write the report of one launch. Returns the error, or an empty string."""
    program = [sys.executable, str(root / "get_training_info.py"), *command.words]
    program += ["--info-json", str(folder / f"{command.name}.json")]
    environ = {**os.environ, **command.environ}
    done = subprocess.run(program, cwd=root, env=environ, capture_output=True, text=True, timeout=120)
    return "" if done.returncode in (0, 1) else f"{command.name}: exit {done.returncode}: {done.stderr.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout of the program to run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    commands = [*example_commands(ROOT), *measured_commands(ROOT / "tests" / "data" / "measured")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [
            fault for fault in pool.map(lambda each: write(each, root=options.root, folder=options.folder), commands) if fault
        ]
    print(f"{len(commands) - len(faults)} of {len(commands)} reports are in {options.folder}")
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
