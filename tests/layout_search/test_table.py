"""The layouts of a result as a table of pandas."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from analyzer.layout_search.executors import Workers
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.search import search_space
from tests.examples import QUICK
from tests.layout_search.tiny import SEARCHED, tiny_space

pytestmark = pytest.mark.skipif(find_spec("pandas") is None and not os.environ.get("CI"), reason="the extra test is not installed")


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search_space(tiny_space(("tp", "pp") if QUICK else SEARCHED), Workers())


@pytest.mark.slow
def test_a_row_for_each_layout_of_the_result(result: SearchResult) -> None:
    import pandas

    table = result.to_pandas()
    layouts = list(result)
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == len(layouts)
    assert list(table["iteration_seconds"]) == sorted(each.iteration_seconds for each in layouts)
    assert list(table["device_bytes"]) == [each.device_bytes for each in layouts]
    assert table["best"].sum() == len(result.best)
    assert table["front"].sum() == len(result.front)
    parts = [name for name in table.columns if name.endswith("_seconds") and name != "iteration_seconds"]
    assert parts
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["iteration_seconds"].to_numpy())


def test_without_pandas_the_error_is_an_import_error(result: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError):
        result.to_pandas()
