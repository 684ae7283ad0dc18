"""The faults of `tools/faults.py`: their lines are in the sources, and their tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.faults import FAULTS, Fault
from tools.mutants import ROOT, with_fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_changes_one_line_of_valid_code(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    changed = with_fault(fault, text)
    assert sum(before != after for before, after in zip(text.splitlines(), changed.splitlines(), strict=True)) == 1
    ast.parse(changed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_names_a_test_that_exists(fault: Fault) -> None:
    file, _, name = fault.test.partition("::")
    assert name in {each.name for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)}


def test_every_package_of_formulas_has_a_fault() -> None:
    packages = {name for fault in FAULTS for name in Path(fault.file).parts[1:-1]}
    assert packages >= {
        *("specs", "launch", "frameworks", "script", "layout", "schedule", "hardware", "modules", "buffers", "passes", "program"),
        *("states", "memory", "communication", "trace", "predict", "time", "layout_search", "inference", "report"),
    }
    assert len(FAULTS) >= 40


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_line_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 lines"):
        with_fault(Fault("missing", "file.py", "a = 1", "a = 2", "tests/test_file.py::test_a"), "a = 3\n")
