"""The faults of `tools/mutants.py`: their lines are in the sources."""

from __future__ import annotations

import ast

import pytest

from tools.mutants import FAULTS, ROOT, Fault, with_fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_changes_one_line_of_valid_code(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    changed = with_fault(fault, text)
    assert sum(before != after for before, after in zip(text.splitlines(), changed.splitlines(), strict=True)) == 1
    ast.parse(changed)


def test_a_line_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 lines"):
        with_fault(Fault("missing", "file.py", "a = 1", "a = 2"), "a = 3\n")
