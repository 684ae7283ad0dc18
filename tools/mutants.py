"""Plants the faults of `tools/faults.py`, one at a time, and prints which of them the fast tests catch.

    python tools/mutants.py [--all-tests] [NAME ...]

For each fault the test that it names runs, which takes about a second; with `--all-tests` all fast tests, which take a minute or
two. The tests run in a temporary copy of the repository, without the golden outputs and without the shadow engine. Exit status 1:
a fault survives. 2: the tests do not run, or fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.faults import FAULTS, Fault

ROOT: Final = Path(__file__).resolve().parent.parent
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "-m", "not slow and not shadow and not cuda")
ALL_TESTS: Final = ("-n", "2", "--ignore", "tests/tools/test_mutants.py")
"""Every fast test, except those that fail for every fault."""


def line_of(fault: Fault, text: str) -> int:
    """The index of the line that a fault replaces. It must be there once."""
    found = [index for index, line in enumerate(text.splitlines()) if line.strip() == fault.old]
    if len(found) != 1:
        raise ValueError(f"{fault.file} has {len(found)} lines {fault.old!r}")
    return found[0]


def with_fault(fault: Fault, text: str) -> str:
    """The text of the file with the fault in it."""
    lines = text.splitlines(keepends=True)
    index = line_of(fault, text)
    lines[index] = lines[index].replace(fault.old, fault.new)
    return "".join(lines)


def copy_repository(folder: Path) -> None:
    """Copies the files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """Runs fast tests of a copy. Returns the first test that fails, or None.

    Raises SystemExit if pytest does not run them, for example if one of them does not exist.
    """
    environ = {**os.environ, "FUZZ": "quick", "PYTHONPATH": str(folder)}
    done = subprocess.run((*PYTEST, *tests), cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    return failed[0].partition(" ")[2].partition(" - ")[0]


def main(names: list[str], *, all_tests: bool) -> int:
    """Prints one line per fault; returns the exit status."""
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_repository(folder)
        failure = first_failure(folder, ALL_TESTS if all_tests else sorted({fault.test for fault in chosen}))
        if failure is not None:
            print(f"{failure} fails without a fault", file=sys.stderr)
            return 2
        for fault in chosen:
            file = folder / fault.file
            file.write_text(with_fault(fault, file.read_text()))
            failure = first_failure(folder, ALL_TESTS if all_tests else (fault.test,))
            survivors += failure is None
            print(f"{'survives' if failure is None else 'caught  '}  {fault.name}: {failure or fault.file}", flush=True)
            shutil.copy2(ROOT / fault.file, file)
    return 1 if survivors else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only faults whose name contains one of these")
    parser.add_argument("--all-tests", action="store_true", help="run all fast tests for each fault, not only its own")
    given = parser.parse_args()
    sys.exit(main(given.names, all_tests=given.all_tests))
