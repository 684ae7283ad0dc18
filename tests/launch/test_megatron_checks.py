"""The checks of Megatron's validating functions: each is done by this program, or there is a reason why not, and the reverse."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError, UnsupportedError
from tests.data_files import data_file
from tests.job_of import BASE, HARDWARE, job_of

ROOT = Path(__file__).resolve().parents[2]
REASONS = {
    "no_effect": "no effect on memory, time or communication",
    "not_training": "concerns inference, reinforcement learning, retrieval, or the conversion of checkpoints",
    "not_reachable": "no launch of pretraining can break it",
    "not_modelled": "the option is refused or reported as not counted",
    "installed_packages": "depends on versions of installed packages, which a launch does not tell",
}
CHECKING = ("analyzer/specs/rules", "analyzer/launch/derive", "analyzer/launch/checks")
"""Packages whose refusals are those of Megatron, or in own_refusals.json with a reason."""


def _document(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(data_file(f"megatron_checks/{name}.json").read_text())
    return content


ROWS: list[dict[str, Any]] = [*_document("arguments")["rows"], *_document("configs")["rows"]]
REFUSED = [row for row in ROWS if "refused" in row]


def _name(row: dict[str, Any]) -> str:
    return str(row["condition"])[:60]


def _raises(function: ast.AST) -> bool:
    """Whether a function creates an error for a launch or a violation."""
    calls = (each.func for each in ast.walk(function) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Name) and each.id in {"InputError", "Violation"} for each in calls)


def _functions(folder: str) -> set[str]:
    """The functions of a package that refuse a launch, as module:function."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        nodes = ast.walk(ast.parse(file.read_text()))
        found |= {f"{module}:{node.name}" for node in nodes if isinstance(node, ast.FunctionDef) and _raises(node)}
    return found


def test_every_check_is_done_or_has_a_reason() -> None:
    wrong = [_name(row) for row in ROWS if len(row.keys() & {"refused", "warned", "not_refused"}) != 1]
    assert not wrong
    assert len(ROWS) == 458
    for row in ROWS:
        if "not_refused" in row:
            assert row["not_refused"]["reason"] in REASONS, _name(row)
            assert row["not_refused"]["why"], _name(row)


@pytest.mark.parametrize("row", REFUSED, ids=_name)
def test_a_launch_that_breaks_a_check_is_refused(row: dict[str, Any]) -> None:
    example = row["refused"]
    gpu = HARDWARE[example.get("gpu", "H100-80GB")]
    broken_gpu = HARDWARE[example.get("broken_gpu", gpu.name)]
    environ = example.get("environ", {})
    broken_environ = environ | example.get("broken_environ", {})
    broken_base = BASE.replace(example.get("without", ""), "")
    for release in example.get("releases", row["releases"]):
        job_of(example["accepted"], release=release, gpu=gpu, environ=environ)
        with pytest.raises(InputError) as caught:
            job_of(example["broken"], base=broken_base, release=release, gpu=broken_gpu, environ=broken_environ)
        assert not isinstance(caught.value, UnsupportedError)
        assert example["says"] in str(caught.value)


@pytest.mark.parametrize("row", [row for row in ROWS if "warned" in row], ids=_name)
def test_a_launch_that_breaks_a_tolerated_check_gets_a_warning(row: dict[str, Any]) -> None:
    example = row["warned"]
    for release in example.get("releases", row["releases"]):
        assert any(example["says"] in sentence for sentence in job_of(example["line"], release=release).warnings)
        assert not any(example["says"] in sentence for sentence in job_of("", release=release).warnings)


def test_the_functions_named_in_the_table_refuse_launches() -> None:
    existing = _functions("analyzer/specs") | _functions("analyzer/launch")
    named = {row["refused"]["by"] for row in REFUSED}
    assert not named - existing
    assert all(row["warned"]["by"] == "analyzer.launch.checks.tolerated:warn_of_tolerated" for row in ROWS if "warned" in row)


def test_every_refusal_is_in_the_table_or_has_a_reason() -> None:
    own = _document("own_refusals")
    named = {row["refused"]["by"] for row in REFUSED}
    found = {function for folder in CHECKING for function in _functions(folder)}
    assert not found - named - own.keys(), "refusals that are neither in the table of Megatron's checks nor in own_refusals.json"
    assert not own.keys() - found, "entries of own_refusals.json without a function"
    assert not own.keys() & named, "entries of own_refusals.json that are in the table"
