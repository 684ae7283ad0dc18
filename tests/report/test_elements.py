"""Tables of the console report."""

from __future__ import annotations

import pytest

from analyzer.report.console.elements import table
from analyzer.report.console.report import draw

NUMBERS = ("671,026,404,352", "27,334,958,080", "143.57 GiB")


@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize("most", [None, 5, 13])
def test_numbers_are_never_cut(width: int, most: int | None) -> None:
    """In a narrow terminal, and in columns of limited width. A size stays on one line with its unit."""
    rows = [("a long name of a row that is wrapped if there is no room", number, "79.18 GiB") for number in NUMBERS]
    text = draw([table(("", "cost of a million tokens", "free"), rows, align="lrr", most=most)], width=width)
    assert "…" not in text
    assert all(number in text for number in NUMBERS)
    assert text.count("79.18 GiB") == len(NUMBERS)
    assert all(len(line) <= width for line in text.splitlines())
