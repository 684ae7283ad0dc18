"""Write analyzer/launch/options/catalogue.json: the options of all supported Megatron-LM releases.

    python tools/make_catalogue.py [FOLDER]

FOLDER (default: tests/data/options) has one file `core_vX.Y.Z.json.gz` per release from 0.12 on, a list of argparse actions.
Earlier releases are differences from later ones (`options_before_0_12`, `options_2023`). The catalogue has one row per variant of
an option: [releases, flags, dest, kind, nargs, const, default, type, choices]. `releases` is a bit mask over the list of releases.
Trailing nulls are omitted.
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
    """Return one row for each variant of an option, with the mask of the releases that have this variant."""
    masks: dict[str, int] = {}
    for bit, options in enumerate(releases.values()):
        defaults: dict[str, Any] = {}
        for option in options:
            # argparse uses the default of the first option of a dest; the catalogue repeats it on all of them
            default = defaults.setdefault(option["dest"], option["default"])
            row = {**option, "kind": KINDS[option["kind"]], "default": default}
            fields = [row[field] for field in FIELDS]
            while fields[-1] is None:
                fields.pop()
            key = json.dumps(fields)
            masks[key] = masks.get(key, 0) | 1 << bit
    return [[mask, *json.loads(key)] for key, mask in masks.items()]


def main(folder: Path = OPTIONS) -> None:
    files = sorted(folder.glob("core_v*.json.gz"), key=version)
    releases = {".".join(map(str, version(path))): json.loads(gzip.decompress(path.read_bytes())) for path in files}
    oldest = next(iter(releases.values()))
    releases = {"2023": options_2023(oldest), **earlier_releases(oldest), **releases}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows(releases))
    CATALOGUE.write_text(f'{{"releases":{json.dumps(list(releases))},"options":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
