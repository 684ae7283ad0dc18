"""Configurations of published models for tests, and the options that --info-model gives for them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from analyzer.launch.model_config.launch_words import with_model
from analyzer.launch.model_config.published import CATALOGUE

NOWHERE = Path("/nowhere")


def published() -> dict[str, Any]:
    """The entries of the catalogue by name."""
    models: dict[str, Any] = json.loads(CATALOGUE.read_text())["models"]
    return models


def write_config(folder: Path, name: str, **changed: object) -> Path:
    """Write the config.json of a published model, with changes; None removes a field."""
    values = {**published()[name]["config"], **changed}
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return file


def words(
    reference: str | Path, launch: str = "", *, script: bool = False, release: str = "0.16.1", folder: Path = NOWHERE
) -> tuple[str, ...]:
    """The words of a launch with --info-model `reference`."""
    return with_model(str(reference), shlex.split(launch), script=script, release=release, folder=folder).words


def notes(reference: str | Path, launch: str = "") -> str:
    """The assumptions about a model, in one text."""
    return " ".join(with_model(str(reference), shlex.split(launch), script=True, release="0.16.1", folder=NOWHERE).notes)


def options(line: str | tuple[str, ...]) -> dict[str, str]:
    """The options in a line with their values, of equal ones the last; the empty text for flags without a value."""
    found: dict[str, str] = {}
    flag = ""
    for word in shlex.split(line) if isinstance(line, str) else line:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = value if equals else ""
        else:
            found[flag] = f"{found[flag]} {word}".strip()
    return found
