"""Write analyzer/launch/options/catalogue.json: the options of all supported Megatron-LM releases.

    python tools/make_catalogue.py [FOLDER]

FOLDER (default: tests/data/options) has one file `core_vX.Y.Z.json.gz` per release from 0.12 on, a list of argparse actions.
Earlier releases are differences from later ones (`options_before_0_12`, `options_2023`).

The catalogue has one line for each interval of releases in which an option is the same, sorted by flags and releases:
[flags, interval, dest, kind, nargs, const, default, type, choices]. The interval "0.13-0.16" includes both releases, "0.13-" the
newest release as well, "-0.16" the oldest one, and "-" is all releases. So a new option adds one line, and a new release changes
only the lines of options that it changes. Trailing nulls are omitted.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.specs.release import minor
from tools.options_2023 import CHANGED_DEFAULTS, REMOVED, UNCHANGED
from tools.options_before_0_12 import earlier_releases

ROOT = Path(__file__).parent.parent
CATALOGUE = ROOT / "analyzer" / "launch" / "options" / "catalogue.json"
OPTIONS = ROOT / "tests" / "data" / "options"
FIELDS = ("flags", "dest", "kind", "nargs", "const", "default", "type", "choices")
KINDS = {"StoreAction": "store", "StoreTrueAction": "true", "StoreFalseAction": "false", "BooleanOptionalAction": "boolean"}


def version(path: Path) -> tuple[int, ...]:
    """Return the version in a file name: (0, 16, 1) for core_v0.16.1.json.gz."""
    return tuple(int(part) for part in re.findall(r"\d+", path.name))


def options_2023(oldest: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of August 2023, derived from those of the oldest release."""
    known = set(UNCHANGED)
    kept: list[dict[str, Any]] = [
        {**option, "default": CHANGED_DEFAULTS.get(option["dest"], option["default"])}
        for option in oldest
        if known.intersection(option["flags"])
    ]
    return kept + REMOVED


def rows(releases: dict[str, list[dict[str, Any]]]) -> list[list[Any]]:
    """Return the lines of the catalogue, as described above. `releases` has the options of each release, the oldest first."""
    found: dict[str, list[int]] = {}
    for index, options in enumerate(releases.values()):
        defaults: dict[str, Any] = {}
        for option in options:
            # argparse uses the default of the first option of a dest; the catalogue repeats it on all of them
            default = defaults.setdefault(option["dest"], option["default"])
            row = {**option, "kind": KINDS[option["kind"]], "default": default}
            fields = [row[field] for field in FIELDS]
            while fields[-1] is None:
                fields.pop()
            found.setdefault(json.dumps(fields), []).append(index)
    names = [minor(release) for release in releases]
    listed = []
    for key, indices in found.items():
        flags, *fields = json.loads(key)
        listed += [(flags, first, [flags, interval(names, first, last), *fields]) for first, last in runs(indices)]
    return [row for _, _, row in sorted(listed)]


def runs(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive integers; `indices` ascend."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def interval(names: list[str], first: int, last: int) -> str:
    """Return the releases from the index `first` to the index `last` of `names`, without bounds that are the oldest or newest."""
    return f"{names[first] if first > 0 else ''}-{names[last] if last < len(names) - 1 else ''}"


def main(folder: Path = OPTIONS) -> None:
    files = sorted(folder.glob("core_v*.json.gz"), key=version)
    releases = {".".join(map(str, version(path))): json.loads(gzip.decompress(path.read_bytes())) for path in files}
    oldest = next(iter(releases.values()))
    releases = {"2023": options_2023(oldest), **earlier_releases(oldest), **releases}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows(releases))
    CATALOGUE.write_text(f'{{"releases":{json.dumps(list(releases))},"options":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
