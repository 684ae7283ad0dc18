"""Overlapped communication and fused kernels in a search, and layouts that the time model cannot tell apart."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import combinations

import pytest

from analyzer.api import analyze, search
from analyzer.errors import AnalyzerError
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.options import as_short_text
from analyzer.layout_search.overlaps import ALWAYS, EXPERTS, FUSIONS, OVERLAPS, SEARCHED, suits_layout, suits_split
from analyzer.layout_search.result import ERROR_OF_ORDER, SearchResult, rows
from analyzer.layout_search.space import Recompute, Split, Stages
from analyzer.report.console.search_section import print_search
from analyzer.report.json.search import search_json
from analyzer.results import Report
from analyzer.specs.option_names import flag_of
from tests.layout_search.random_spaces import FIXED, NOWHERE
from tests.layout_search.test_options import applied

DENSE = (
    "--nproc-per-node 8 --info-model meta-llama/Llama-2-13b-hf --seq-length 4096 --global-batch-size 256 "
    "--use-distributed-optimizer --info-gpu H100-80GB"
)
MOE = (
    "--nproc-per-node 8 --info-model Qwen/Qwen3-30B-A3B --num-layers 16 --seq-length 4096 --global-batch-size 64 "
    "--use-distributed-optimizer --expert-model-parallel-size 8 --info-gpu H100-80GB"
)
FLAGS = tuple(map(flag_of, OVERLAPS))


@cache
def found(line: str, *over: str, keep: tuple[str, ...] = ()) -> SearchResult:
    return search(line, over=over, keep=keep, environ={}, folder=NOWHERE, workers="1")


def report(words: list[str]) -> Report:
    return analyze(words, environ={}, folder=NOWHERE)


def device_bytes(of: Report) -> int:
    return max(rank.memory.device_bytes for rank in of.ranks)


def on(each: Evaluation) -> set[str]:
    """The options of the dimension that a layout switches on."""
    return {flag for flag in FLAGS if each.options.get(flag) is True}


@pytest.mark.slow
def test_the_first_layout_of_a_13b_has_the_overlaps_and_no_other_set_of_them_is_faster() -> None:
    first = found(DENSE, "tp", "pp", "micro-batch", "overlap").best[0]
    assert {"--overlap-grad-reduce", "--overlap-param-gather", "--cross-entropy-loss-fusion"} <= on(first)
    plain = {flag: value for flag, value in first.options.items() if flag not in FLAGS}
    for count in range(len(FLAGS) + 1):
        for flags in combinations(FLAGS, count):
            try:
                other = report(applied(DENSE.split(), {**plain, **dict.fromkeys(flags, True)}))
            except AnalyzerError:
                continue
            assert other.time is not None
            assert first.iteration_seconds <= other.time.iteration_seconds * (1 + 1e-12), flags


def test_the_overlap_of_tensor_parallelism_is_used_where_it_is_faster() -> None:
    result = found(f"{DENSE} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", "overlap")
    assert "--tp-comm-overlap" in on(result.best[0])
    assert result.given is not None
    assert result.given.options == {}
    assert result.best[0].parts_seconds["exposed_tp"] < result.given.parts_seconds["exposed_tp"]


def test_the_exchange_of_tokens_overlaps_where_it_is_faster() -> None:
    result = found(MOE, "overlap")
    assert {"--overlap-moe-expert-parallel-comm", "--moe-permute-fusion"} <= on(result.best[0])
    assert result.given is not None
    assert result.best[0].parts_seconds["exposed_ep"] < result.given.parts_seconds["exposed_ep"] / 2


SMALL_MOE = MOE.replace("--num-layers 16", "--num-layers 4").replace("--global-batch-size 64", "--global-batch-size 16")
SLOW = (
    pytest.param(DENSE, ("tp", "pp", "overlap"), marks=pytest.mark.slow),
    pytest.param(MOE, ("ep", "tp", "overlap"), marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("line", "over"), [*SLOW, (SMALL_MOE, ("ep", "overlap"))])
def test_each_layout_is_accepted_and_has_the_figures_of_its_report(line: str, over: tuple[str, ...]) -> None:
    result = found(line, *over)
    assert result.best
    for each in result:
        alone = report(applied(line.split(), each.options))
        assert alone.time is not None
        assert alone.time.iteration_seconds == pytest.approx(each.iteration_seconds, rel=1e-12)
        assert device_bytes(alone) == each.device_bytes


def test_options_of_the_launch_stay() -> None:
    given = ("--overlap-grad-reduce", "--cross-entropy-loss-fusion")
    result = found(f"{DENSE} {' '.join(given)}", "pp", "overlap")
    assert all(not each.options.keys() & set(given) for each in result)
    assert "--overlap-param-gather" in on(result.best[0])


@pytest.mark.parametrize(
    ("flag", "rest"),
    [
        ("--overlap-param-gather", {"--overlap-grad-reduce", "--cross-entropy-loss-fusion"}),
        ("--overlap-grad-reduce", {"--cross-entropy-loss-fusion"}),  # which the other one needs
        ("--cross-entropy-loss-fusion", {"--overlap-grad-reduce", "--overlap-param-gather"}),
    ],
)
def test_kept_options_are_not_switched_on(flag: str, rest: set[str]) -> None:
    result = found(DENSE, "pp", "overlap", keep=(flag,))
    assert {frozenset(on(each)) for each in result if each.layout.stages.pipeline < 8} == {frozenset(rest)}
    assert all(flag not in each.options for each in result)


def test_nothing_is_switched_on_unless_it_is_searched() -> None:
    assert not any(on(each) for each in found(DENSE, "tp", "pp"))


def test_nothing_is_reduced_between_replicas_if_there_is_one() -> None:
    for each in found(DENSE, "tp", "pp", "overlap"):
        split, stages = each.layout.split, each.layout.stages
        alone = split.tensor * stages.pipeline == 8
        assert ("--overlap-grad-reduce" in on(each)) != alone, each.options


def test_parameters_are_gathered_only_with_the_distributed_optimizer() -> None:
    result = search(FIXED["overlap"].words, over=("tp", "optimizer", "overlap"), environ={}, folder=NOWHERE, workers="1")
    sharded = [("--use-distributed-optimizer" in each.options, each) for each in result]
    assert {each for each, _ in sharded} == {False, True}
    for distributed, each in sharded:
        assert ("--overlap-param-gather" in on(each)) == (distributed and each.layout.split.tensor < 8), each.options


def test_a_layout_that_fits_only_without_overlaps_is_listed_without() -> None:
    """Buckets make reserved memory larger: 67.1 GiB instead of 65.8 GiB."""
    line = f"{DENSE} --cross-entropy-loss-fusion"
    plain = f"{line} --pipeline-model-parallel-size 4".split()
    without, with_overlaps = (device_bytes(report(words)) for words in (plain, [*plain, *FLAGS[:2]]))
    assert without < with_overlaps
    for capacity, expected in ((with_overlaps, set(FLAGS[:2])), (with_overlaps - 1, set())):
        result = found(f"{line} --info-gpu-memory {capacity}", "pp", "overlap")
        assert [on(each) for each in result.best if each.layout.stages.pipeline == 4] == [expected]


def test_each_option_is_in_one_group() -> None:
    groups = (ALWAYS, SEARCHED, FUSIONS, EXPERTS)
    assert sorted(OVERLAPS) == sorted(dest for group in groups for dest in group)


def test_short_text_of_overlaps() -> None:
    options: dict[str, object] = {"--pipeline-model-parallel-size": 2, **dict.fromkeys(FLAGS, True)}
    assert as_short_text(options) == "PP 2, overlap gradients parameters TP EP, fuse loss permutation"
    assert as_short_text({"--tp-comm-overlap": False}) == "no --tp-comm-overlap"


@pytest.mark.parametrize("over", [("tp", "pp", "overlap"), pytest.param(("tp", "pp", "vpp", "overlap"), marks=pytest.mark.slow)])
def test_layouts_within_the_error_equal_the_first(over: tuple[str, ...]) -> None:
    result = found(DENSE, *over)
    assert result.error == ERROR_OF_ORDER == 0.03
    limit = 1.03 * result.best[0].iteration_seconds
    equal = [each.iteration_seconds <= limit for each in result.best]
    assert equal[0]
    assert 1 < sum(equal) < len(equal)
    assert [result.equals_first(each) for each in result.best] == equal
    document = json.loads(json.dumps(search_json(result)))
    assert document["error"] == 0.03
    assert [each["equals_first"] for each in document["best"]] == equal
    assert [row["equals_first"] for row in rows(result) if row["best"]] == equal
    assert sum(map(replace(result, error=0.0).equals_first, result.best)) == 1


@pytest.mark.parametrize("over", [("tp", "pp", "overlap"), pytest.param(("tp", "pp", "vpp", "overlap"), marks=pytest.mark.slow)])
def test_the_table_marks_equal_layouts(over: tuple[str, ...]) -> None:
    result = found(DENSE, *over)
    stream = StringIO()
    print_search(result, report(DENSE.split()), stream=stream)
    printed = stream.getvalue()
    marked = [line.split()[1] == "=" for line in printed.splitlines() if " GiB " in line and line.strip()[:1].isdigit()]
    assert marked[: len(result.best)] == [place > 0 and result.equals_first(each) for place, each in enumerate(result.best)]
    assert "=: equal to the first, within the error of the times (3%)." in printed


@pytest.mark.parametrize(
    ("tensor", "sequence", "suited"), [(1, False, False), (2, True, True), (8, True, True), (8, False, False), (16, True, False)]
)
def test_userbuffers_need_sequence_parallelism_in_an_nvlink_domain(tensor: int, sequence: bool, suited: bool) -> None:
    """Eight GPUs have NVLink. `validate_args`: `--tp-comm-overlap` needs `--sequence-parallel` (training/arguments.py, 0.16.1)."""
    split = Split(tensor=tensor, expert_tensor=tensor, sequence=sequence)
    assert suits_split({"tp_comm_overlap": True}, split, domain=8) is suited
    assert suits_split({}, split, domain=8)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "granularity", "suited"),
    [(1, 1, None, True), (2, 1, None, False), (2, 2, None, True), (2, 2, "selective", True), (2, 2, "full", False)],
)
def test_overlapped_exchanges_need_virtual_stages(pipeline: int, virtual: int, granularity: str | None, suited: bool) -> None:
    """`TransformerConfig.__post_init__` (0.16.1), overlap_moe_expert_parallel_comm: virtual stages in a pipeline, and no full
    recomputation."""
    stages, recompute = Stages(pipeline=pipeline, virtual=virtual), Recompute(granularity=granularity)
    assert suits_layout({"overlap_moe_expert_parallel_comm": True}, stages, recompute) is suited
    assert suits_layout({}, stages, recompute)
