"""The options of a Megatron-LM checkout, from its own parser. They are cached, so later runs do not import it again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.launch.options.catalogue import PREFERRED
from analyzer.launch.options.option_table import Option, OptionTable, make_table

PARSERS: Final = ("megatron/training/arguments.py", "megatron/arguments.py")
"""Files with the parser: since core 0.6, and before."""
DEFINING_FILES: Final = ("megatron/*.py", "megatron/*/enums.py", "megatron/training/arg*.py", "megatron/training/**/*config*.py",
                         "megatron/core/*config*.py", "megatron/core/*/*config*.py", "megatron/core/*/*/*config*.py",
                         "megatron/core/**/enums.py", "megatron/core/package_info.py",
                         "megatron/training/config/*.py")  # fmt: skip
"""Files that define the options."""
SECONDS: Final = 120


def find_checkout(folder: Path, *, environ: Mapping[str, str], entry: str | None) -> Path | None:
    """The checkout that the launch would import: in the folder of its script, the working folder, or on PYTHONPATH.

    It has a parser of the present layout or of that before core 0.6. Raises InputError for a folder that cannot be searched.
    """
    beside = [(folder / entry).parent] if entry is not None and "/" in entry else []
    on_path = [folder / part for part in environ.get("PYTHONPATH", "").split(":") if part]
    for candidate in (*beside, folder, *on_path):
        try:
            if any((candidate / parser).is_file() for parser in PARSERS):
                return candidate
        except OSError as error:
            fault = f"cannot be searched for Megatron-LM ({error.strerror})"
            remedy = "correct PYTHONPATH or the permissions of the folder, or give --info-megatron RELEASE"
            raise InputError(str(candidate), fault, remedy) from None
    return None


def load_table(checkout: Path, *, environ: Mapping[str, str]) -> OptionTable:
    """The options of `checkout`. Raises InputError if there is no parser, or if it cannot be loaded."""
    parser = next((checkout / name for name in PARSERS if (checkout / name).is_file()), None)
    if parser is None:
        raise InputError("--info-megatron", f"{checkout} has no {PARSERS[0]}", "give the root folder of a Megatron-LM checkout")
    cached = _cache_folder(environ) / f"{_content_hash(checkout)}.json"
    release, source = assumed_release(checkout), str(parser)
    try:
        rows = json.loads(cached.read_bytes())
        table = make_table([Option(**row) for row in rows], release=release, source=source)
        if table.options:
            return table
    except (OSError, ValueError, TypeError, RecursionError):  # no cached table, or a malformed one
        pass
    fresh = _extract(checkout)
    _write_cache(cached, fresh)
    return make_table((Option(**row) for row in fresh), release=release, source=source)


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the cached tables. Without a home folder nothing is cached: there are no files below a device."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "get-training-info"
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:  # a user without an entry in /etc/passwd
        home = Path(os.devnull)
    return home / ".cache" / "get-training-info"


def _content_hash(checkout: Path) -> str:
    """A digest of every file that can change the options, including extract_options.py."""
    from hashlib import sha256

    digest = sha256(Path(__file__).with_name("extract_options.py").read_bytes())
    for path in sorted({path for pattern in DEFINING_FILES for path in checkout.glob(pattern) if path.is_file()}):
        digest.update(str(path.relative_to(checkout)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _extract(checkout: Path) -> list[dict[str, Any]]:
    """Runs extract_options.py: first without PyTorch, which is faster, then with it. Raises InputError if both fail."""
    import subprocess
    import sys
    import tempfile

    failure = "it wrote no output"
    script = Path(__file__).with_name("extract_options.py")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "options.json"
        for torch in ("without-torch", "with-torch"):
            command = [sys.executable, "-P", "-B", str(script), str(checkout.resolve()), str(output), torch]
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired:
                failure = f"it took more than {SECONDS} s"
                continue
            if done.returncode == 0 and output.is_file():
                rows: list[dict[str, Any]] = json.loads(output.read_text())
                return rows
            failure = (done.stderr.strip().splitlines() or [failure])[-1]
    raise InputError(
        "--info-megatron", f"the parser in {checkout} cannot be loaded: {failure}", "leave it out to use the built-in catalogue"
    )


def _write_cache(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows in one atomic step. A cache that cannot be written is not an error."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(rows))
        partial.replace(path)
    except OSError:
        return


def release_of(checkout: Path) -> str | None:
    """The release of a checkout: the version in megatron/core/package_info.py, '2023' before core 0.3; None without this file."""
    try:
        text = (checkout / "megatron/core/package_info.py").read_text(errors="replace")
    except OSError:
        return None
    numbers = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    version = tuple(int(found.group(1)) if found else 0 for found in numbers)
    return "2023" if version < (0, 3) else ".".join(map(str, version))


def assumed_release(checkout: Path) -> str:
    """The release of a checkout. If it does not say: 0.16.1, or that of August 2023 if the parser is in megatron/ as in 2023."""
    return release_of(checkout) or (PREFERRED if (checkout / PARSERS[0]).is_file() else "2023")
