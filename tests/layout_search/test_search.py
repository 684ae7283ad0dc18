"""The course of a search: workers, interruption, and spaces without a layout that fits."""

from __future__ import annotations

from functools import cache

import pytest

from analyzer.api import analyze, problem_of, read_launch, search
from analyzer.layout_search import search as search_module
from analyzer.layout_search.executors import workers
from analyzer.layout_search.options import as_text
from analyzer.layout_search.related import largest
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.search import Progress, aim_of, search_space
from analyzer.memory.ranks import highest_rank
from analyzer.results import Report
from tests.layout_search.every_layout import figures
from tests.layout_search.random_spaces import NOWHERE, Case

WORDS = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 8 --seq-length 1024 --swiglu "
    "--max-position-embeddings 1024 --bf16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9999 "
    "--info-gpu H100-80GB --micro-batch-size 1 --global-batch-size 16 --info-gpu-memory 12000MiB"
)
OVER = ("pp", "vpp", "tp", "recompute")


def result(count: int = 1, memory: str = "12000MiB") -> SearchResult:
    """The result of the search, computed once for each size of rounds and tasks."""
    return _result(count, memory, search_module.TASK, search_module.ROUNDS["table"])


@cache
def _result(count: int, memory: str, *_sizes: int) -> SearchResult:
    space = Case((*WORDS.split(), "--info-gpu-memory", memory), OVER, ()).space
    with workers(str(count)) as found:
        return search_space(space, found)


def content(found: SearchResult) -> tuple[object, ...]:
    """A result without its duration."""
    return found.best, found.front, found.given, found.place, found.candidates, found.evaluated, found.complete


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bounds leave out layouts of a small space, and that tests look at equal searches."""
    monkeypatch.setattr(search_module, "TASK", 4)
    monkeypatch.setattr(search_module, "ROUNDS", dict.fromkeys(search_module.ROUNDS, 16))
    monkeypatch.setattr(search_module, "BETWEEN_PROGRESS", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_the_result_does_not_depend_on_the_number_of_workers(count: int) -> None:
    assert content(result(count)) == content(result())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_the_result_does_not_depend_on_the_size_of_tasks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(result())
    monkeypatch.setattr(search_module, "TASK", size)
    assert content(result()) == before


def test_bounds_leave_out_layouts() -> None:
    found = result()
    assert len(found.best) == search_module.BEST
    assert 10 <= found.evaluated < found.candidates / 2


def test_progress_tells_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    monkeypatch.setattr(search_module, "BETWEEN_PROGRESS", 0.0)
    found = search(WORDS, over=OVER, environ={}, folder=NOWHERE, progress=seen.append)
    assert [each.expanded for each in seen] == sorted(each.expanded for each in seen)
    assert seen[-1].open == 0
    assert seen[-1].evaluated == found.evaluated
    assert seen[-1].best_seconds == found.best[0].iteration_seconds


@pytest.mark.parametrize("rounds", [1, 4, 8])
def test_an_interrupted_search_returns_what_it_has_found(rounds: int) -> None:
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == rounds:
            raise KeyboardInterrupt

    found = search(WORDS, over=OVER, environ={}, folder=NOWHERE, progress=interrupt)
    assert len(seen) == rounds
    assert not found.complete
    assert found.evaluated == seen[-1].evaluated
    assert seen[-1].open > 0
    complete = result()
    assert found.given == complete.given
    assert found.best[0].iteration_seconds == seen[-1].best_seconds
    assert figures(found.best[0]) >= figures(complete.best[0])


def test_a_search_without_a_layout_that_fits_is_empty_and_complete() -> None:
    found = result(memory="600MiB")
    assert (found.best, found.front, found.given, found.place) == ((), (), None, None)
    assert found.complete
    assert not list(found)
    assert found.candidates == result().candidates


def test_a_result_lists_its_layouts_by_time() -> None:
    found = result()
    assert [each.iteration_seconds for each in found] == sorted(each.iteration_seconds for each in found)
    assert {each.layout for each in found} == {each.layout for each in (*found.best, *found.front)}


# Two to eight ranks share the optimizer states, so that reserved memory differs between data-parallel ranks.
SHARDED = (
    "--nproc-per-node 8 --info-model Qwen/Qwen2.5-7B --global-batch-size 64 --seq-length 4096 --info-gpu H100-80GB",
    "--nproc-per-node 4 --info-model mistralai/Mistral-7B-v0.1 --global-batch-size 32 --seq-length 4096 --info-gpu A100-80GB",
)


def needed(report: Report) -> int:
    return max(rank.memory.device_bytes for rank in report.ranks)


@pytest.mark.parametrize("line", [pytest.param(SHARDED[0], marks=pytest.mark.slow), SHARDED[1]])
def test_the_memory_of_each_listed_layout_is_that_of_its_report(line: str) -> None:
    found = search(line, over=("tp", "pp"), environ={}, folder=NOWHERE)
    assert len(found.best) > 1
    for each in found:
        alone = analyze(f"{line} {as_text(each.options)}", environ={}, folder=NOWHERE)
        assert each.device_bytes == needed(alone)
        assert ("tight" if each.tight else "fits") == alone.verdict.state


def test_a_layout_in_which_one_rank_does_not_fit_is_not_listed() -> None:
    """The first rank of the launch fits, and another one needs 0.19 GiB more (docs/accuracy.md, parts of the optimizer states)."""
    line = f"{SHARDED[1]} --seq-length 3072"
    launch = read_launch(line.split(), environ={}, folder=NOWHERE)
    every, first = needed(analyze(line, environ={}, folder=NOWHERE)), highest_rank(launch.job).memory.device_bytes
    assert first < every - 2**27
    found = search(f"{line} --info-gpu-memory {every - 2**20}", over=("tp",), environ={}, folder=NOWHERE)
    assert found.given is None
    assert all(each.options and each.device_bytes < every for each in found)


def test_the_largest_value_of_an_option_has_the_memory_of_its_report() -> None:
    launch = read_launch(SHARDED[1].split(), environ={}, folder=NOWHERE)
    found = largest(problem_of(launch), "seq-length")
    assert found.value == 3072
    assert found.device_bytes == needed(analyze(f"{SHARDED[1]} --seq-length {found.value}", environ={}, folder=NOWHERE))


def test_a_limit_of_time_ends_a_search_with_a_proven_bound() -> None:
    """The given layout is known from the start; without more time, the bound is that of the fastest possible split."""
    found = search(WORDS, over=OVER, environ={}, folder=NOWHERE, seconds=1e-9)
    assert (found.complete, found.evaluated) == (False, 0)
    complete = result()
    assert found.best == (complete.given,)
    assert 0 < found.least_seconds <= complete.best[0].iteration_seconds <= found.best[0].iteration_seconds
    assert found.gap == pytest.approx(1 - found.least_seconds / found.best[0].iteration_seconds)
    assert complete.gap == 0


def test_only_a_small_space_is_searched_for_all_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Case(tuple(WORDS.split()), OVER, ()).space
    assert (aim_of(space), aim_of(space, thorough=False)) == ("table", "fastest")
    monkeypatch.setattr(search_module, "FEW", 1)
    assert (aim_of(space), aim_of(space, thorough=True)) == ("fastest", "table")
