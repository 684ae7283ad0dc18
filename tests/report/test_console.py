"""The console report: order of its parts, --info-detail, widths, colours, and printed parts that add up to printed sums."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from analyzer.report.console.elements import table
from analyzer.report.console.report import draw, print_report, sections
from analyzer.results import Advice, Report, Timeline
from tests.fake_report import large_report, make_job, make_report, small_report
from tests.report.printed import SIZE, UNITS, check_memory_table, check_parts, section, sizes, titles

SHORT = ("Memory of the highest-memory rank", "Groups and communication", "Assumptions")
MEMORY = ("Memory of each rank",)
GROUPS = ("Process groups",)
COMMUNICATION = (
    "Communication of the cluster",
    "Pipeline-parallel communication",
    "Data-parallel communication",
    "Tensor-parallel communication",
)
TREE = ("Full model without parallelism", "Layers on one rank and their collectives")
DETAILS = {"memory": MEMORY, "groups": GROUPS, "communication": COMMUNICATION, "tree": TREE}
KEY_FIGURES = ("model", "parameters", "layout", "batch", "peak", "GPU capacity", "headroom", "method", "assumptions")


class _Stream(io.StringIO):
    """A stream that may be a terminal and may not support UTF-8."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def _text(report: Report, *, width: int = 100, detail: Sequence[str] = ()) -> str:
    return draw(sections(report, width=width, detail=detail), width=width)


def _words(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def test_the_verdict_is_first_then_key_figures_memory_and_assumptions() -> None:
    text = _text(small_report())
    lines = text.splitlines()
    assert lines[0].startswith("It fits: rank 0 (stage 0) needs 30.45 GiB of 80.00 GiB (H100-80GB); 49.55 GiB (62%) remain free.")
    names = [found[1] for line in lines[:20] if (found := re.match(r"  ([a-zA-Z]+(?: capacity)?)  ", line))]
    assert tuple(names[: len(KEY_FIGURES)]) == KEY_FIGURES
    assert titles(text) == SHORT
    assert lines[-1] == "More: --info-detail memory, groups, communication, tree or full (all sections)."


def test_key_figures() -> None:
    text = _words(_text(small_report()))
    for figure in (
        "model GPT, 24 layers, hidden size 4,096, FFN hidden size 16,384, 32 attention heads, vocabulary size 50,257",
        "parameters 5,039,296,512; 1,311,514,624 on rank 0",
        "layout 16 GPUs (2 nodes of 8): TP2 PP2 DP4",
        "batch Micro-batch size 4, global batch size 512: 32 microbatches per iteration per data-parallel rank; sequence length",
        "peak 28.98 GiB allocated, 29.28 GiB reserved, 30.45 GiB on the device (rank 0)",
        "GPU capacity 80.00 GiB (H100-80GB)",
        "headroom 49.55 GiB (62% of the capacity)",
        "assumptions 2, at the end of this report",
    ):
        assert figure in text


def test_the_largest_assumption_of_a_moe_model_is_named() -> None:
    report = replace(small_report(), assumptions=("Balanced routing is assumed: every expert gets the mean number of tokens.", "b"))
    assert "assumptions 2, at the end of this report; the largest: balanced routing" in _words(_text(report))


@pytest.mark.parametrize("name", DETAILS)
def test_a_named_section_is_printed_with_verdict_and_key_figures(name: str) -> None:
    text = _text(small_report(), detail=(name,))
    assert text.startswith("It fits: ")
    assert "  headroom  " in text
    assert titles(text) == (*DETAILS[name], "Assumptions")
    left = [other for other in DETAILS if other != name]
    assert text.splitlines()[-1] == f"More: --info-detail {', '.join(left)} or full (all sections)."


def test_several_sections_can_be_named() -> None:
    assert titles(_text(small_report(), detail=("tree", "groups"))) == (*GROUPS, *TREE, "Assumptions")


@pytest.mark.parametrize("detail", [("full",), tuple(DETAILS), ("memory", "full")])
def test_full_prints_all_sections(detail: tuple[str, ...]) -> None:
    text = _text(small_report(), detail=detail)
    assert titles(text) == (*MEMORY, *GROUPS, *COMMUNICATION, *TREE, "Assumptions")
    assert "--info-detail" not in text


def test_what_is_unknown_is_printed_first() -> None:
    stated = "The number of GPUs is not given."
    assert _text(small_report(unknown=(stated,))).splitlines()[:2] == [stated, ""]


def test_warnings_are_printed_before_memory() -> None:
    stated = ("--nnodes is not given: torchrun starts 1 node.", "--use-sharp: memory that SHARP reserves is not counted.")
    text = _text(small_report(assumptions=stated, warnings=stated[1:]))
    assert titles(text) == ("Warnings", *SHORT)
    assert section(text, "Warnings")[0] == f"  · {stated[1]}"
    assert section(text, "Assumptions")[0] == f"  · {stated[0]}"
    assert "  1, at the end" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("detail", [(), ("full",)])
def test_lines_fit_the_width(width: int, detail: tuple[str, ...]) -> None:
    for report in (small_report(), large_report()):
        assert [line for line in _text(report, width=width, detail=detail).splitlines() if len(line) > width] == []


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_figure_is_printed_on_one_line_with_its_unit(width: int) -> None:
    text = _text(small_report(), width=width, detail=("full",))
    assert not re.search(r"[\d.]+\n\s*[KMGT]?i?B\b", text)
    for size in ("64.00 MiB", "1,311,514,624", "5,039,296,512", "28.98 GiB", "30.45 GiB"):
        assert size in text


def test_shapes_and_collectives_are_beside_the_figures_on_wide_terminals() -> None:
    narrow, wide = (section(_text(small_report(), width=width, detail=("tree",)), "Layers on one rank") for width in (80, 160))
    assert len(wide) < len(narrow)
    assert any("linear_proj" in line and "weight[4096,2048]" in line for line in wide)
    assert not any("linear_proj" in line and "weight[4096,2048]" in line for line in narrow)
    assert sum("all_reduce" in line for line in wide) == sum("all_reduce" in line for line in narrow) > 0


@pytest.mark.parametrize("width", [60, 100, 180])
@pytest.mark.parametrize(("detail", "sums"), [((), 1), (("memory",), 2)])
def test_printed_memory_adds_up(width: int, detail: tuple[str, ...], sums: int) -> None:
    assert check_memory_table(section(_text(small_report(), width=width, detail=detail), "Memory of")) == sums


@pytest.mark.parametrize("detail", [(), ("memory",)])
def test_printed_parts_of_workspaces_and_temporary_tensors_add_up(detail: tuple[str, ...]) -> None:
    assert check_parts(section(_text(small_report(), detail=detail), "Memory of")) >= 2


@pytest.mark.parametrize("width", [80, 160])
def test_printed_parameters_of_the_tree_add_up(width: int) -> None:
    """The parameters of a node are the sum over its children, each times the number before its figure."""
    rows: list[tuple[int, int, int]] = []
    for line in section(_text(small_report(), width=width, detail=("tree",)), "Full model"):
        found = re.match(r"  ([│├└─ ]*)([\w.–]+) +(?:(\d+) × )?([\d,]+)(?: |$)", line)
        if found:
            rows.append((len(found[1]) // 4, int(found[3] or 1), int(found[4].replace(",", ""))))
    checked = 0
    for index, (depth, _, value) in enumerate(rows):
        below = []
        for other_depth, times, amount in rows[index + 1 :]:
            if other_depth <= depth:
                break
            if other_depth == depth + 1:
                below.append(times * amount)
        if below:
            assert sum(below) == value
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("width", [60, 100])
def test_printed_communication_adds_up(width: int) -> None:
    lines = section(_text(small_report(), width=width, detail=("communication",)), "Communication of the cluster")
    rows = [line for line in lines if SIZE.search(line)]
    *parts, total = rows
    assert total.split()[0] == "all"
    calls = [int(re.findall(r"  ([\d,]+)  ", line)[-1].replace(",", "")) for line in rows]
    assert sum(calls[:-1]) == calls[-1]
    slack = sum(0.005 * UNITS[SIZE.findall(line)[-1][1]] for line in rows)
    assert abs(sum(sizes(line)[-1] for line in parts) - sizes(total)[-1]) <= slack


def test_the_short_report_has_the_communication_of_all_ranks() -> None:
    report = small_report()
    calls = sum(total.cluster_calls_per_iteration for total in report.communication_totals.values())
    text = _words("\n".join(section(_text(report), "Groups and communication")))
    assert f"in {calls:,} calls, summed over all ranks." in text
    assert "Process groups: 8 groups of 2 GPUs, tensor (tp); 8 groups of 2 GPUs, pipeline (pp); 4 groups of 4 GPUs" in text
    assert "edp" not in text  # the same groups as dp_cp


def test_groups_have_the_names_of_nodes_and_gpus() -> None:
    text = _text(small_report(), detail=("groups",))
    assert "8 groups of 2 GPUs, tensor (tp)" in text
    # the groups in the example of the proposal of 2023 (docs/proposal-2023.md)
    for group in ("[n0_g0 n0_g1]", "[n0_g0 n1_g0]", "[n0_g0 n0_g2 n0_g4 n0_g6]", "[n1_g1 n1_g3 n1_g5 n1_g7]"):
        assert group in text
    assert "(cp)" not in text  # its groups have one rank each
    assert "4 groups of 4 GPUs, expert data (edp): the same groups as data (dp_cp)" in text


def test_the_report_of_thousands_of_gpus_is_short_by_default() -> None:
    text = _text(large_report())
    assert len(text.splitlines()) < 70
    assert "2,048 groups of 8 GPUs, tensor (tp)" in text
    assert "Other ranks need " in text


def test_sections_in_full_list_all_stages_and_groups() -> None:
    report = large_report()
    text = _text(report, detail=("full",))
    words = _words(text)
    for kind in ("tp", "pp", "dp_cp"):
        assert all(f"n{ranks[-1] // 8}_g{ranks[-1] % 8}]" in text for ranks in report.groups[kind])
        left = report.group_counts[kind] - len(report.groups[kind])
        assert not left or f"… {left:,} more" in words
    assert all(re.search(rf"stage {stage}\b", text) for stage in range(16))
    assert all(f"Peak of rank {rank.ranks[0][0]}," in text for rank in report.ranks if rank.pipeline_rank in (0, 15))
    assert "n0_g0 … n127_g7" in text


def test_stages_of_equal_memory_share_a_column() -> None:
    job = make_job(layers=8, pipeline=4)
    report = make_report(job)
    first = report.ranks[1]
    equal = [replace(rank, memory=first.memory, parameters=first.parameters) for rank in report.ranks[1:3]]
    text = _text(replace(report, ranks=(report.ranks[0], *equal, report.ranks[3])), detail=("memory",))
    header = section(text, "Memory of each rank")[0]
    assert header.split() == ["stage", "0", "stages", "1–2", "stage", "3"]


def test_a_launch_that_does_not_fit_gets_advice_before_memory() -> None:
    report = small_report(
        advice=(
            Advice(change="--use-distributed-optimizer", device_bytes=10 * 2**30, saves_bytes=20 * 2**30, fits=True),
            Advice(change="--micro-batch-size 2", device_bytes=11 * 2**30, saves_bytes=19 * 2**30, fits=True),
        )
    )
    missing = replace(report.verdict, fits=False, capacity_bytes=30 * 2**30, headroom_bytes=-(2**29), tightest_rank=0)
    text = _text(replace(report, verdict=missing))
    assert _words(text).startswith(
        "It does not fit: rank 0 (stage 0) needs 30.45 GiB, and an H100-80GB has 30.00 GiB: "
        "512.00 MiB too much (2% of the capacity)."
    )
    before = text.partition("── ")[0]
    assert "headroom" not in before
    assert "Each of these changes would make it fit:" in before
    assert re.search(r"--use-distributed-optimizer +20\.00 GiB +10\.00 GiB\n", before)
    assert re.search(r"--micro-batch-size 2 +19\.00 GiB +11\.00 GiB\n", before)


def test_a_tight_verdict_has_the_range_of_the_estimate() -> None:
    report = small_report()
    tight = replace(report.verdict, state="tight", capacity_bytes=31 * 2**30, headroom_bytes=2**29)
    text = _words(_text(replace(report, verdict=tight)))
    assert "It is tight: rank 0 (stage 0) needs 30.45 GiB of 31.00 GiB (H100-80GB); the estimate ranges from 29.57 GiB" in text
    assert "The estimate leaves 512.00 MiB free, less than its own error." in text
    both = replace(tight, margin_bytes=2**30)
    text = _words(_text(replace(report, verdict=both)))
    assert "The estimate leaves 512.00 MiB free, less than its own error. That is below the margin of 1.00 GiB (3%)." in text


def test_a_verdict_that_is_tight_because_of_the_margin_names_the_margin() -> None:
    report = small_report()
    tight = replace(report.verdict, state="tight", capacity_bytes=40 * 2**30, headroom_bytes=9 * 2**30, margin_bytes=10 * 2**30)
    text = _words(_text(replace(report, verdict=tight)))
    assert text.startswith(
        "It is tight: rank 0 (stage 0) needs 30.45 GiB of 40.00 GiB (H100-80GB); "
        "the headroom of 9.00 GiB (22%) is below the margin of 10.00 GiB (25%)."
    )


def test_without_a_capacity_there_is_no_verdict_and_the_note_has_the_reason() -> None:
    unknown = replace(small_report().verdict, fits=None, gpu=None, capacity_bytes=None, headroom_bytes=None, note="No driver here.")
    lines = _text(small_report(verdict=unknown)).splitlines()
    assert lines[0].startswith("No verdict: the GPU is not known.")
    assert "No driver here." in lines
    assert "  GPU capacity  not known" in lines


def test_one_gpu_has_neither_groups_nor_communication() -> None:
    job = make_job(world_size=1, nodes=1, gpus_per_node=1, tensor=1, pipeline=1, expert_tensor=1)
    report = replace(make_report(job), communication=(), communication_totals={}, groups={})
    assert "  layout        1 GPU (1 node of 1): no parallelism" in _text(report)
    assert section(_text(report), "Groups and communication")[:2] == ["  Process groups: none.", "  Communication: none."]
    text = _text(report, detail=("full",))
    assert "One GPU does not communicate." in text
    assert "One GPU has no process groups." in text
    assert "parallel communication" not in text


def test_charts_of_recorded_bytes_are_part_of_memory() -> None:
    report = small_report()
    line = Timeline(kinds=("parameter",), points=((2**30,), (2**31,), (2**30,)))
    report = replace(report, timelines=(line,) * len(report.ranks))
    assert sum("from 1.00 GiB to 2.00 GiB" in each for each in _text(report).splitlines()) == 1
    assert sum("from 1.00 GiB to 2.00 GiB" in each for each in _text(report, detail=("memory",)).splitlines()) == 2
    assert "from 1.00 GiB" not in _text(report, detail=("groups",))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _printed(stream: _Stream) -> str:
    print_report(small_report(), stream=stream)
    return stream.getvalue()


def test_files_get_plain_text_and_terminals_the_same_text_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    in_file, on_terminal = _printed(_Stream()), _printed(_Stream(terminal=True))
    assert "\x1b" not in in_file
    assert "\x1b[1" in on_terminal
    bare = re.sub(r"\x1b\[[\d;]*m", "", on_terminal)
    assert [line.rstrip() for line in bare.splitlines()] == in_file.splitlines()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_and_dumb_terminals_get_plain_text(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in _printed(_Stream(terminal=True))


def test_the_width_is_that_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, _printed(_Stream()).splitlines())) == 70
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, _printed(_Stream()).splitlines())) == 200
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert max(map(len, _printed(_Stream()).splitlines())) == 100


def test_an_encoding_without_line_drawing_gets_ascii() -> None:
    stream = _Stream(encoding="ascii")
    print_report(small_report(), detail=("tree",), stream=stream)
    assert stream.getvalue().isascii()
    assert "|-- decoder" in stream.getvalue()


def test_a_narrow_table_wraps_its_first_column_and_keeps_its_figures() -> None:
    rows = [["a long name of a row", "1,000", "2.00 GiB"]]
    text = draw([table(("", "calls", "bytes"), rows, align="lrr")], width=30)
    assert text.splitlines() == ["               calls     bytes", "  a long name  1,000  2.00 GiB", "  of a row"]
