"""Access to the reference data in tests/data, which tests/data/README.md describes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"


def data_file(name: str) -> Path:
    """Return the path of tests/data/NAME."""
    return DATA / name


def truth(name: str) -> dict[str, Any]:
    """Return the document tests/data/truth/NAME."""
    content: dict[str, Any] = json.loads(data_file(f"truth/{name}").read_text())
    return content


def truth_records(name: str) -> list[dict[str, Any]]:
    """Return the records of tests/data/truth/NAME."""
    content: list[dict[str, Any]] = truth(name)["records"]
    return content


def measured_records(*names: str) -> list[dict[str, Any]]:
    """Return the measured runs of tests/data/measured/NAME for each name; without names, those of all files."""
    files = [data_file(f"measured/{name}") for name in names] or sorted(data_file("measured").glob("*.json"))
    return [record for file in files for record in json.loads(file.read_text())]


def public_launches() -> list[dict[str, Any]]:
    """Return the records of tests/data/launches/public_launches.json."""
    content: list[dict[str, Any]] = json.loads(data_file("launches/public_launches.json").read_text())
    return content


def parser_options(release: str) -> list[dict[str, Any]]:
    """Return every option of a Megatron-LM release, as listed by its argparse parser."""
    content: list[dict[str, Any]] = json.loads(gzip.decompress(data_file(f"options/core_v{release}.json.gz").read_bytes()))
    return content
