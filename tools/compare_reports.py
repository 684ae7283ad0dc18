"""Compare the JSON reports of two directories: keys and numbers must be equal, text may differ.

    python tools/write_reports.py /tmp/before
    (change the code)
    python tools/write_reports.py /tmp/after
    python tools/compare_reports.py /tmp/before /tmp/after

Keys, numbers, booleans, nulls and the lengths of lists are compared, and also the strings under `IDENTIFIERS`, which other programs
read. `assumptions` and `warnings` are not compared. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

TEXT: Final = frozenset({"assumptions", "warnings"})
"""Keys whose values are lists of sentences."""
IDENTIFIERS: Final = frozenset(
    {"schema", "engine", "megatron", "order", "group", "kind", "phase", "dtype", "sharding", "state", "gpu", "peer"}
)
"""Keys whose string values are part of the JSON schema."""
MAX_SHOWN: Final = 10
"""Maximum number of differences that are printed for each report."""


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each difference between two JSON values."""
    key = path.rpartition(".")[2].partition("[")[0]
    if key in TEXT:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() ^ after.keys()):
            yield f"{path}.{name}: only {'before' if name in before else 'after'}"
        for name in before.keys() & after.keys():
            yield from differences(before[name], after[name], f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path}: {len(before)} elements before, {len(after)} after"
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(before, str) and isinstance(after, str):
        if key in IDENTIFIERS and before != after:
            yield f"{path}: {before!r} before, {after!r} after"
    elif type(before) is not type(after) or before != after:
        yield f"{path}: {before!r} before, {after!r} after"


def compare(before: Path, after: Path) -> int:
    """Compare all reports of two directories and print their differences. Returns the number of reports that differ."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.json")})
    differing = 0
    for name in names:
        missing = [folder for folder in (before, after) if not (folder / name).exists()]
        if missing:
            lines = [f"not in {missing[0]}"]
        else:
            one, other = (json.loads((folder / name).read_text()) for folder in (before, after))
            lines = list(islice(differences(one, other), MAX_SHOWN + 1))
        if lines:
            differing += 1
            print(f"{name}:", *lines[:MAX_SHOWN], *(["…"] if len(lines) > MAX_SHOWN else []), sep="\n  ")
    print(f"{len(names) - differing} of {len(names)} reports have equal keys and numbers")
    return differing


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python tools/compare_reports.py BEFORE AFTER", file=sys.stderr)
        return 2
    before, after = (Path(word) for word in sys.argv[1:])
    if not any(before.glob("*.json")):
        print(f"{before} has no reports; create them with tools/write_reports.py", file=sys.stderr)
        return 2
    return 1 if compare(before, after) else 0


if __name__ == "__main__":
    sys.exit(main())
