"""Configurations by name: the catalogue of published models, or a config.json in a file or folder.

The catalogue is published.json. Each entry has the fields of the model's config.json that its options depend on, the names of
models that differ from it at most in the longest sequence, and the source that the fields were taken from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.launch.info_options import MODEL
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.refused import refusal_of_name
from analyzer.launch.written_files import as_written

CATALOGUE: Final = Path(__file__).with_name("published.json")
FILE: Final = "config.json"
_VARIANT: Final = re.compile(r"-(mcore|fp8|nvfp4|base|instruct|chat|thinking|hf|ms|it|bf16|\d{4})$", re.IGNORECASE)
"""Ends of names of checkpoints with the same layers: Qwen3-4B-Instruct-2507-FP8."""


def read_configuration(reference: str, *, folder: Path) -> Configuration:
    """The configuration that `reference` names: the path of a config.json, of a folder that has one, or a published model.

    Paths are relative to `folder`. Names are found as `published_model` finds them. Raises InputError.
    """
    path = as_written(folder / reference)
    if path.is_dir() and as_written(path / FILE).is_file():
        path = as_written(path / FILE)
    if path.is_file():
        return Configuration(_values(path), reference)
    if path.is_dir():
        raise InputError(MODEL, f"the folder {reference} has no {FILE}", f"give a folder or a file with the model's {FILE}")
    if reference.endswith(".json"):
        raise InputError(MODEL, f"{reference} was not found", "give the path of a config.json, or the name of a published model")
    return _published(reference)


def _values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(MODEL, f"{path} cannot be read ({error.strerror})", "give a readable config.json") from None
    except RecursionError:
        raise InputError(MODEL, f"{path} is nested too deeply", "give the config.json of a model") from None
    except ValueError as error:
        raise InputError(MODEL, f"{path} is not JSON ({str(error).splitlines()[0]})", "give the config.json of a model") from None
    if not isinstance(values, dict):
        raise InputError(MODEL, f"{path} is not a JSON object", "give the config.json of a model")
    return values


def _published(reference: str) -> Configuration:
    names = dict(_names())
    wanted = _catalogued(reference, names)
    if wanted is None:
        raise refusal_of_name(reference.strip("/")) or _unknown(reference, names)
    name, values = names[wanted]
    return Configuration(values, name)


def published_names() -> dict[str, str]:
    """The published models, by their names in lower case, with and without organization."""
    return {written: name for written, (name, _) in _names()}


def published_model(reference: str) -> str | None:
    """The published model with the layers of `reference`, a name or the path of a checkpoint; None if there is none.

    Names are found in any case, with any organization or folder, and without ends such as `-Instruct` and `-FP8`, which name
    another training or the dtype of the weights, and not other layers.
    """
    names = published_names()
    wanted = _catalogued(reference, names)
    return None if wanted is None else names[wanted]


def published_configuration(reference: str) -> Configuration | None:
    """The configuration of the model that `published_model` finds; None if there is none."""
    names = dict(_names())
    wanted = _catalogued(reference, names)
    return None if wanted is None else Configuration(names[wanted][1], names[wanted][0])


def _catalogued(reference: str, names: Container[str]) -> str | None:
    """The one of `names`, which are in lower case, that `reference` stands for."""
    part = reference.strip("/").lower()
    while part:
        for each in (part, part.rpartition("/")[2]):
            if each in names:
                return each
        shorter = _VARIANT.sub("", part)
        if shorter == part:
            return None
        part = shorter
    return None


def published_model_of_size(path: str, *, layers: int, hidden_size: int) -> str | None:
    """The published model that the last part of a path or name has the name of, if it has this size."""
    name, values = dict(_names()).get(path.rstrip("/").rpartition("/")[2].lower(), ("", {}))
    same = (values.get("num_hidden_layers"), values.get("hidden_size")) == (layers, hidden_size)
    return name if same else None


def _names() -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Every name in lower case, with and without its organization, and the entry it stands for."""
    models = json.loads(CATALOGUE.read_text(encoding="utf-8"))["models"]
    for name, entry in models.items():
        for each in (name, *entry["aliases"]):
            yield each.rpartition("/")[2].lower(), (each, entry["config"])
            yield each.lower(), (each, entry["config"])


def _unknown(reference: str, names: dict[str, tuple[str, dict[str, Any]]]) -> InputError:
    from difflib import get_close_matches

    written = reference.lower()
    longer = [name for name in names if name.startswith(written) or name.rpartition("/")[2].startswith(written)]
    near = longer[:6] or get_close_matches(written, names, n=3, cutoff=0.6)
    similar = list(dict.fromkeys(names[each][0] for each in near))
    remedy = "give the path of its config.json" + (f", or use {' or '.join(similar)}" if similar else "")
    return InputError(MODEL, f"{reference!r} is neither a file nor a published model in the catalogue", remedy)
