"""A search leaves out nothing: its result is that of all layouts of a space, each evaluated exactly."""

from __future__ import annotations

import pytest

from analyzer.errors import AnalyzerError
from analyzer.launch.build import build
from analyzer.layout_search import search as search_module
from analyzer.layout_search.executors import workers
from analyzer.layout_search.problem import with_changes
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.search import ROUNDS, Aim, search_space
from analyzer.specs.rules import violations
from tests.layout_search.every_layout import Every, expected_best, expected_front, expected_place, figures

BEST = 3
FRONT = 1.08


def searched(every: Every, aim: Aim) -> SearchResult:
    """A search with a short result and short rounds, so that bounds leave out most layouts of a small space."""
    with pytest.MonkeyPatch.context() as patch, workers("1") as found:
        for name, value in {"BEST": BEST, "FRONT": FRONT, "TASK": 2, "ROUNDS": dict.fromkeys(ROUNDS, 8)}.items():
            patch.setattr(search_module, name, value)
        return search_space(every.space, found, aim=aim)


@pytest.fixture(scope="module")
def result(every: Every) -> SearchResult:
    return searched(every, "table")


def test_a_search_finds_what_all_layouts_give(every: Every, result: SearchResult) -> None:
    fitting = every.fitting(most=BEST)
    best = expected_best(every.space, fitting, most=BEST)
    assert [figures(each) for each in result.best] == best
    assert [figures(each) for each in result.front] == expected_front(fitting, share=FRONT)
    given = next((each for each in fitting if not each.options), None)
    assert (result.given and figures(result.given)) == (given and figures(given))
    assert result.place == expected_place(given, best)
    assert result.complete
    assert result.evaluated <= result.candidates


def test_a_quick_search_finds_the_fastest_layout(every: Every, result: SearchResult) -> None:
    found = searched(every, "fastest")
    fitting = every.fitting(most=0)  # without the overlapped exchange of tokens, which is tried for the layouts that were found
    assert bool(found.best) == bool(fitting)
    assert found.complete
    assert found.evaluated <= result.evaluated
    if fitting:
        assert found.best[0].iteration_seconds <= min(each.iteration_seconds for each in fitting)
        assert found.least_seconds == found.best[0].iteration_seconds


def test_a_search_for_any_layout_finds_one_if_one_fits(every: Every) -> None:
    found = searched(every, "any")
    assert bool(found.best) == bool(every.fitting(most=0))


def test_the_layouts_of_a_result_are_accepted_and_fit(every: Every, result: SearchResult) -> None:
    problem = every.space.problem
    of_layout = {each.layout: each for each in every.layouts}
    for found in result:
        one = of_layout[found.layout]
        assert found.options == one.evaluation.options
        assert found.parts_seconds == one.evaluation.parts_seconds
        assert found.device_bytes <= problem.capacity
        assert not list(violations(one.job))
        try:
            job = build(
                with_changes(problem.arguments, one.changes),
                problem.world,
                environ={},
                gpu=problem.gpu,
                folder=problem.folder,
                moe_imbalance=problem.moe_imbalance,
            )
        except AnalyzerError as error:
            pytest.fail(f"{found.options}: {error}")
        assert job.parallel.world_size == problem.given.parallel.world_size
        assert job.batch.global_batch_size == problem.given.batch.global_batch_size
        assert job.batch.seq_length == problem.given.batch.seq_length


def test_the_layouts_of_a_space_differ(every: Every) -> None:
    layouts = every.searched
    options = [str(sorted(each.changes.items(), key=str)) for each in layouts]
    assert len(set(options)) == len(options)
