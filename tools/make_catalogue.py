"""Write analyzer/launch/options/catalogue.json: every option of the Megatron-LM releases that we know, once per variant.

    python tools/make_catalogue.py

The folder tests/data/options holds `core_vX.Y.Z.json.gz`, one list of argparse actions for each release. A row of the catalogue is
[releases, flags, dest, kind, nargs, const, default, type, choices]: `releases` is a bit mask over the list of
releases, and nulls at the end are left out.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from options_2023 import ALREADY_THERE, CHANGED_DEFAULTS, GONE

ROOT = Path(__file__).parent.parent
CATALOGUE = ROOT / "analyzer" / "launch" / "options" / "catalogue.json"
OPTIONS = ROOT / "tests" / "data" / "options"
FIELDS = ("flags", "dest", "kind", "nargs", "const", "default", "type", "choices")
KINDS = {"StoreAction": "store", "StoreTrueAction": "true", "StoreFalseAction": "false", "BooleanOptionalAction": "boolean"}


def version(path: Path) -> tuple[int, ...]:
    """(0, 16, 1) of core_v0.16.1.json."""
    return tuple(int(part) for part in re.findall(r"\d+", path.name))


def options_2023(oldest: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of August 2023, made from those of the oldest release."""
    known = set(ALREADY_THERE)
    kept = [
        {**option, "default": CHANGED_DEFAULTS.get(option["dest"], option["default"])}
        for option in oldest
        if known.intersection(option["flags"])
    ]
    return kept + GONE


def rows(releases: dict[str, list[dict[str, Any]]]) -> list[list[Any]]:
    """One row for each variant of an option, with the mask of the releases that have it so."""
    masks: dict[str, int] = {}
    for bit, options in enumerate(releases.values()):
        defaults: dict[str, Any] = {}
        for option in options:
            # argparse takes the default of a dest from its first option: here it stands on all of them
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
    releases = {"2023": options_2023(oldest), **releases}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows(releases))
    CATALOGUE.write_text(f'{{"releases":{json.dumps(list(releases))},"options":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
