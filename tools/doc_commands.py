"""The shell commands of the documentation, and how they are run: `python tools/doc_commands.py [FILE ...]` prints what fails.

A command is a fenced block with the language bash. A comment before the block says what it needs:

    <!-- not run: REASON -->    it cannot run in a test, for one of `REASONS`
    <!-- run with: WORDS -->    words that are added to its last command, such as a limit of the time
    <!-- exit: N -->            its exit status, if it is not 0
    <!-- needs: EXTRA -->       it is run where the extra is installed

The blocks of a page run one after the other in a folder of their own, with `FILES` and a copy of examples/. If a block with the
language text follows a command without text between, it is a part of what the command prints, unless words are added to it; a line
with … stands for lines that are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
REASONS: Final = (
    "files of another project",
    "installs packages",
    "needs a GPU",
    "needs a cluster",
    "needs the network",
    "runs all tests",
    "runs until it is stopped",
    "takes minutes",
)
"""Why a command is not run."""
SCRIPT: Final = "examples/pretrain_llama3_8b.sh"
FILES: Final = {
    **dict.fromkeys(("train.sh", "old.sh", "SCRIPT.sh", "pretrain.sh"), SCRIPT),
    "new.sh": "examples/pretrain_llama3_70b.sh",
    "run.log": "examples/run.log",
}
"""Files that commands name, and what they are copies of."""
CACHE: Final = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
GAP: Final = "…"
VARYING: Final = re.compile(r"\d+(\.\d+)? s: |\bin \d+\.\d+ s\b")
"""Durations of a search, which differ between runs."""
_BLOCK: Final = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n+)*)^```bash\n(?P<text>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
_MARK: Final = re.compile(r"<!-- (not run|run with|exit|needs): (.*?) -->")


class Block(NamedTuple):
    """A block of commands."""

    file: Path
    line: int
    text: str
    printed: str
    """What the page shows of the output; empty if it shows nothing."""
    not_run: str = ""
    """The reason why it is not run; empty if it is run."""
    words: str = ""
    """Words that are added to its last command."""
    status: int = 0
    needs: str = ""
    """The extra that must be installed."""

    @property
    def command(self) -> str:
        """What is run."""
        return f"{self.text.rstrip()} {self.words}".rstrip()

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The files with commands: the README, the pages of docs/ and the other files that are pages of the site."""
    others = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "allocator_hook/FORMAT.md")
    return [*(ROOT / name for name in others), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(file: Path) -> list[Block]:
    """The blocks of a page. Raises ValueError for a comment or a reason that is not known."""
    text = file.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        marks = dict(_MARK.findall(block["marks"]))
        place = f"{file.name}:{text[: block.start('text')].count(chr(10))}"
        if len(marks) != block["marks"].count("<!--"):
            raise ValueError(f"{place}: a comment that is not known")
        if "not run" in marks and marks["not run"] not in REASONS:
            raise ValueError(f"{place}: the reason {marks['not run']!r} is none of {REASONS}")
        found.append(
            Block(
                file,
                text[: block.start("text")].count("\n"),
                block["text"],
                block["printed"] or "",
                not_run=marks.get("not run", ""),
                words=marks.get("run with", ""),
                status=int(marks.get("exit", "0")),
                needs=marks.get("needs", ""),
            )
        )
    return found


def prepare(folder: Path) -> None:
    """Puts the files that commands name into a folder, and the program into its folder bin."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, source in FILES.items():
        shutil.copy(ROOT / source, folder / name)
    (folder / "get_training_info.py").symlink_to(ROOT / "get_training_info.py")
    (folder / "bin").mkdir()
    for name, program in (("get-training-info", f'"{ROOT}/get_training_info.py" '), ("python", ""), ("python3", "")):
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {program}"$@"\n')
        file.chmod(0o755)
    (folder / ".venv").symlink_to(folder, target_is_directory=True)


def run(block: Block, folder: Path, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a block with bash in a folder that `prepare` has made, in an otherwise empty environment.

    The cache is that of the user: it has the library that isolates scripts, which would be compiled for each page.
    """
    environ = {
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "XDG_CACHE_HOME": CACHE,
        "COLUMNS": "100",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        ["bash", "-e", "-c", block.command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def fault(block: Block, done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong with the result of a block; empty if nothing is."""
    if done.returncode != block.status:
        return f"{block.place}: exit status {done.returncode}\n{done.stderr[-2000:]}"
    missing = "" if block.words else missing_lines(block.printed, done.stdout)
    return f"{block.place}: not printed: {missing!r}" if missing else ""


def missing_lines(shown: str, printed: str) -> str:
    """The first part of a shown output, between lines with …, that is not printed in this order; empty if all are.

    Runs of spaces count as one: columns are as wide as their widest cell, which can be in a row that the page does not show.
    """
    rest = _comparable(printed)
    for part in re.split(rf"^\s*{GAP}\n", _comparable(shown), flags=re.MULTILINE):
        if part.strip() and part not in rest:
            return part
        rest = rest[rest.index(part) + len(part) :]
    return ""


def _comparable(text: str) -> str:
    return re.sub(" +", " ", VARYING.sub("", text))


def faults(file: Path, *, installed: tuple[str, ...] = ()) -> Iterator[str]:
    """What is wrong with the commands of a page. `installed`: extras for which commands are run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for block in blocks(file):
            if not block.not_run and (not block.needs or block.needs in installed):
                found = fault(block, run(block, folder))
                if found:
                    yield found


def main() -> None:
    files = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    found = 0
    for file in files:
        for text in faults(file, installed=("shadow", "offload")):
            print(text)
            found += 1
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
