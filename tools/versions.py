"""Compare the formulas with the shadow engine for several releases of megatron-core and Transformer Engine.

    python tools/versions.py [CORE[:TE] ...]

Such as 0.16.1:2.20.2; without TE it is the installed one. CORE can be the folder of a checkout of Megatron-LM. Needs the shadow
extra. PyTorch is that of this interpreter and of PYTHONPATH. Each release is installed without its dependencies into a folder of
its own beside the packages of this interpreter, which stay as they are; of Transformer Engine only its Python part. There, the
layouts of tests/allocator_hook/shadow/test_formulas_against_shadow.py run. The table has the layouts that agree, those that
differ, and those that the releases do not have or that the formulas describe for other releases only. Exit status 1: a layout
differs, and the tests cover both releases (`allocator_hook.packages`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from allocator_hook.packages import CHECKOUTS, COVERED  # noqa: E402
from allocator_hook.sources import Source  # noqa: E402

PAIRS: Final = (
    "0.8.0:1.11.0",
    "0.10.0:1.11.0",
    "0.12.3:2.1.0",
    "0.13.1:2.11.0",
    "0.14.0:2.3.0",
    "0.14.0:2.6.0",
    "0.14.0:2.11.0",
    "0.15.3:2.11.0",
    "0.16.1:2.11.0",
    "0.16.1:2.20.2",
)
"""megatron-core before 0.12 needs Transformer Engine 1, and 0.12.3 one before 2.2: later ones have the rotation elsewhere."""
TEST: Final = "tests/allocator_hook/shadow/test_formulas_against_shadow.py"
CORE: Final = "megatron-core"
TE: Final = "transformer-engine"


@dataclass(frozen=True)
class Pair:
    """Releases of megatron-core and Transformer Engine."""

    core: str
    te: str
    checkout: Path | None = None
    """The folder that has this megatron-core; None for a package."""

    @classmethod
    def of(cls, text: str) -> Pair:
        """Read CORE or CORE:TE. Raises PackageNotFoundError if no Transformer Engine is named or installed."""
        core, _, te = text.partition(":")
        folder = Path(core).absolute()
        release = Source(folder / "megatron/core").release
        return cls(core, te or version(TE)) if release is None else cls(release, te or version(TE), folder)

    @property
    def covered(self) -> bool:
        """Whether `COVERED` or, for a checkout, `CHECKOUTS` names both."""
        checkouts = CHECKOUTS if self.checkout is not None else {}
        return all(
            release.startswith(tuple(f"{each}." for each in (*COVERED[package], *checkouts.get(package, ()))))
            for package, release in ((CORE, self.core), (TE, self.te))
        )


@dataclass(frozen=True)
class Result:
    """Numbers of layouts for one pair of releases."""

    pair: Pair
    agree: int
    differ: int
    skipped: int


def install(package: str, release: str) -> Path | None:
    """The folder with a release of a package, which is installed if it is missing. None if it is the installed release.

    Raises CalledProcessError if pip fails.
    """
    try:
        if version(package) == release:
            return None
    except PackageNotFoundError:
        pass
    folder = Path(sys.prefix) / f"{package}-{release}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"{package}=={release}"]
        subprocess.run(command, check=True)
    return folder


def compare(pair: Pair, *, layouts: str = "") -> Result:
    """Run the comparison with a pair. `layouts` is a pytest expression that selects some of them."""
    core = pair.checkout or install(CORE, pair.core)
    folders = [str(folder) for folder in (install(TE, pair.te), core) if folder is not None]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={found}", TEST]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*command, *(("-k", layouts) if layouts else ())], cwd=ROOT, env=environ, stdout=sys.stderr, check=False)
        return result_of(pair, found.read_text())


def result_of(pair: Pair, report: str) -> Result:
    """The numbers in a report of pytest in the format of JUnit."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    differ = counts["failures"] + counts["errors"]
    return Result(pair, counts["tests"] - differ - counts["skipped"], differ, counts["skipped"])


def table(results: list[Result]) -> list[str]:
    """The rows of a Markdown table."""
    torch = version("torch")
    rows = [
        "| megatron-core | Transformer Engine | PyTorch | agree | differ | not compared |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    return rows + [f"| {_.pair.core} | {_.pair.te} | {torch} | {_.agree} | {_.differ} | {_.skipped} |" for _ in results]


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="CORE[:TE]")
    parser.add_argument("--layouts", default="", help="a pytest expression that selects layouts, such as 'gpt and tp2'")
    options = parser.parse_args(arguments)
    results = [compare(Pair.of(pair), layouts=options.layouts) for pair in options.pairs]
    print("\n".join(table(results)))
    return int(any(each.differ for each in results if each.pair.covered))


if __name__ == "__main__":
    sys.exit(main())
