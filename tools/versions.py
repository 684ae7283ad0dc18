"""Compare the formulas with the shadow engine for several releases of megatron-core: `python tools/versions.py [RELEASE ...]`.

Needs the shadow extra. Each release is installed without its dependencies into a folder of its own beside the packages of this
interpreter, which stay as they are. There, tests/allocator_hook/shadow/test_formulas_against_shadow.py runs with it. The table has
the layouts that agree, those that differ, and those that the release does not have or that the formulas describe for later releases
only. Exit status 1: a layout of a release that `allocator_hook.packages.COVERED` names differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from allocator_hook.packages import COVERED  # noqa: E402

RELEASES: Final = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")
TEST: Final = "tests/allocator_hook/shadow/test_formulas_against_shadow.py"


@dataclass(frozen=True)
class Result:
    """Numbers of layouts for one release."""

    release: str
    agree: int
    differ: int
    skipped: int


def install(release: str) -> Path:
    """The folder with a release of megatron-core, which is installed if it is missing. Raises CalledProcessError."""
    folder = Path(sys.prefix) / f"megatron-core-{release}"
    if not (folder / "megatron" / "core").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"megatron-core=={release}"]
        subprocess.run(command, check=True)
    return folder


def compare(release: str, *, layouts: str = "") -> Result:
    """Run the comparison with a release. `layouts` is a pytest expression that selects some of them."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={found}", TEST]
        environ = {**os.environ, "PYTHONPATH": str(install(release))}
        subprocess.run([*command, *(("-k", layouts) if layouts else ())], cwd=ROOT, env=environ, stdout=sys.stderr, check=False)
        return result_of(release, found.read_text())


def result_of(release: str, report: str) -> Result:
    """The numbers in a report of pytest in the format of JUnit."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    differ = counts["failures"] + counts["errors"]
    return Result(release, counts["tests"] - differ - counts["skipped"], differ, counts["skipped"])


def table(results: list[Result]) -> list[str]:
    """The rows of a Markdown table."""
    installed = f"{version('transformer-engine')} | {version('torch')}"
    rows = [
        "| megatron-core | Transformer Engine | PyTorch | agree | differ | not compared |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    return rows + [f"| {each.release} | {installed} | {each.agree} | {each.differ} | {each.skipped} |" for each in results]


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--layouts", default="", help="a pytest expression that selects layouts, such as 'gpt and tp2'")
    options = parser.parse_args(arguments)
    results = [compare(release, layouts=options.layouts) for release in options.releases]
    print("\n".join(table(results)))
    covered = tuple(f"{release}." for release in COVERED["megatron-core"])
    return int(any(each.differ for each in results if each.release.startswith(covered)))


if __name__ == "__main__":
    sys.exit(main())
