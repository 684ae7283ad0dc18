"""Builds the explorer as a folder of files for any web server: `python tools/build_explorer.py FOLDER [--pyodide FOLDER]`.

The page runs the program in the browser, with Pyodide. The release of `PYODIDE` is fetched with npm into a cache unless a folder
with the files of the npm package is given. The folder then has everything that the page requests. Needs npm, or that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.cli.explorer.files import content, names  # noqa: E402

PYODIDE: Final = "314.0.7"
"""The release on npm. Its first number is the version of Python, 3.14."""
FILES: Final = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Files of the package that a page loads."""
ARCHIVE: Final = "program.zip"
LEFT_OUT: Final = ("analyzer/report/html/assets", "analyzer/cli/explorer/page", "analyzer/script/preload")
"""Folders that the answers do not need."""
DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Of all files in the archive, so that equal sources give an equal archive."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pyodide", type=Path, help="a folder with the files of the npm package pyodide")
    arguments = parser.parse_args()
    build(arguments.folder, arguments.pyodide)
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*") if path.is_file())
    print(f"{arguments.folder}: {size / 1e6:.1f} MB")


def build(folder: Path, pyodide: Path | None = None) -> None:
    """Writes the files of the page, of Pyodide and of the program."""
    source = pyodide or fetched()
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in names():
        (folder / name).write_bytes(content(name) or b"")
    for name in FILES:
        shutil.copyfile(source / name, folder / "pyodide" / name)
    write_archive(folder / ARCHIVE)
    settings = {"backend": "pyodide", "pyodide": "pyodide/", "archive": ARCHIVE}
    (folder / "backend.json").write_text(json.dumps(settings))


def fetched() -> Path:
    """The folder of the npm package."""
    found = npm_package()
    if found is None:
        sys.exit("the explorer needs npm to fetch Pyodide: apt install npm, or give --pyodide FOLDER")
    return found


def npm_package() -> Path | None:
    """The folder of the npm package, from the cache or fetched with npm; None without both."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "get-training-info" / f"pyodide-{PYODIDE}"
    found = cache / "node_modules" / "pyodide"
    npm = shutil.which("npm")
    if all((found / name).is_file() for name in FILES):
        return found
    if npm is None:
        return None
    cache.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cache)]
    subprocess.run([*command, f"pyodide@{PYODIDE}"], check=True, stdout=subprocess.DEVNULL)
    return found


def write_archive(path: Path) -> None:
    """The package `analyzer` as far as the answers need it: sources and data, without the page."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((ROOT / "analyzer").rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            if file.suffix in (".py", ".json") and not name.startswith(LEFT_OUT):
                archive.writestr(zipfile.ZipInfo(name, DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
