"""The report as text: sections, widths, colours, shortened lists, and printed parts that add up to printed sums."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from analyzer.report.console.report import print_report, render
from analyzer.report.console.text import Line, plain, table
from analyzer.results import Advice, Report
from tests.fake_report import large_report, make_job, make_report, small_report

SECTIONS = (
    "Full model without parallelism",
    "Memory of each rank",
    "Does it fit",
    "Communication of the cluster",
    "Pipeline parallelism",
    "Data parallelism",
    "Tensor parallelism",
    "Layers on one rank",
    "Assumptions",
)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(r"(-?[\d,]+(?:\.\d+)?) (B|[KMGT]iB)\b")


class _Stream(io.StringIO):
    """A stream that may be a terminal and may not know UTF-8."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def _text(report: Report, *, width: int = 100, detail: str = "summary") -> str:
    return "\n".join(map(plain, render(report, width=width, detail=detail)))  # type: ignore[arg-type]


def _section(text: str, title: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, each in enumerate(lines) if each.startswith(f"── {title}"))
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("── ")), len(lines))
    return lines[start + 1 : end]


def _sizes(line: str) -> list[float]:
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in SIZE.findall(line)]


def _half_a_digit(line: str) -> list[float]:
    """How far each printed size may be from what it stands for: half of its last digit."""
    return [0.005 * UNITS[unit] for _, unit in SIZE.findall(line)]


def test_sections_come_in_order_and_assumptions_last() -> None:
    titles = [line for line in _text(small_report()).splitlines() if line.startswith("── ")]
    assert len(titles) == len(SECTIONS)
    assert all(title.startswith(f"── {expected}") for title, expected in zip(titles, SECTIONS, strict=True))


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("detail", ["summary", "full"])
def test_lines_keep_to_the_width(width: int, detail: str) -> None:
    # figures come before the width: 405 thousand million parameters need 62 columns
    for report in (small_report(), large_report()) if width > 60 else (small_report(),):
        too_long = [line for line in _text(report, width=width, detail=detail).splitlines() if len(line) > width]
        assert too_long == []


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_figure_is_parted_from_its_unit_and_none_is_lost(width: int) -> None:
    text = _text(small_report(), width=width)
    assert not re.search(r"[\d.]+\n\s*[KMGT]?i?B\b", text)
    for size in ("64.00 MiB", "1,311,514,624", "5,039,296,512", "28.98 GiB", "30.45 GiB"):
        assert size in text


def test_wide_terminals_use_the_width() -> None:
    narrow, wide = (_section(_text(small_report(), width=width), "Layers on one rank") for width in (80, 160))
    assert len(wide) < len(narrow)
    assert any("linear_proj" in line and "all_reduce" in line for line in wide)
    assert not any("linear_proj" in line and "all_reduce" in line for line in narrow)


@pytest.mark.parametrize("width", [60, 100, 180])
def test_printed_memory_adds_up(width: int) -> None:
    """Each sum, marked =, is what stands above it: the parts marked + and the first of them."""
    rows = [
        line for line in _section(_text(small_report(), width=width), "Memory of each rank") if re.match(r"  [ +=] [a-z]", line)
    ]
    sums = 0
    running: list[float] = []
    slack: list[float] = []
    for line in rows:
        sizes = _sizes(line)
        if line.startswith("  = "):
            assert all(abs(a - b) <= s + d for a, b, s, d in zip(running, sizes, slack, _half_a_digit(line), strict=True)), line
            running, slack, sums = sizes, _half_a_digit(line), sums + len(sizes)
        elif line.startswith("  + "):
            running = [a + b for a, b in zip(running, sizes, strict=True)]
            slack = [a + b for a, b in zip(slack, _half_a_digit(line), strict=True)]
        elif line.split()[0] == "parameters" and sizes:
            running, slack = sizes, _half_a_digit(line)
    assert sums == 2


def test_the_parts_of_runtime_and_temporary_memory_add_up_as_printed() -> None:
    lines = _section(_text(small_report()), "Memory of each rank")
    for title, row in (("runtime", "+ runtime"), ("temporary at the peak", "+ temporary at the peak")):
        start = lines.index(f"  {title}") + 1
        end = next((i for i in range(start, len(lines)) if not lines[i].startswith("    ")), len(lines))
        total = next(_sizes(line)[0] for line in lines if line.strip().startswith(row))
        parts = [_sizes(line)[0] for line in lines[start:end]]
        assert sum(parts) == pytest.approx(total, abs=0.005 * UNITS["MiB"] * (len(parts) + 1))


@pytest.mark.parametrize("detail", ["summary", "full"])
def test_printed_parameters_of_the_tree_add_up(detail: str) -> None:
    """A node's parameters are those of the nodes below it, with '24 × ' before a figure counted in."""
    rows: list[tuple[int, int, int]] = []
    for line in _section(_text(small_report(), width=80, detail=detail), "Full model"):
        found = re.match(r"  ([│├└─ ]*)([\w.–]+) +(?:(\d+) × )?([\d,]+)(?: |$)", line)
        if found:
            rows.append((len(found[1]) // 3, int(found[3] or 1), int(found[4].replace(",", ""))))
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


def test_the_printed_communication_adds_up() -> None:
    lines = _section(_text(small_report()), "Communication of the cluster")
    rows = [line for line in lines if SIZE.search(line)]
    *parts, whole = rows
    assert whole.split()[0] == "all"
    calls = [int(re.findall(r"  ([\d,]+)  ", line)[-1].replace(",", "")) for line in rows]
    assert sum(calls[:-1]) == calls[-1]
    slack = sum(_half_a_digit(line)[-1] for line in rows)
    assert abs(sum(_sizes(line)[-1] for line in parts) - _sizes(whole)[-1]) <= slack


def test_groups_carry_the_names_of_nodes_and_gpus() -> None:
    text = _text(small_report())
    assert "8 groups of 2 GPUs, tensor (tp)" in text
    # the groups that the proposal of 2023 prints for its sample (docs/proposal-2023.md)
    for group in ("[n0_g0 n0_g1]", "[n0_g0 n1_g0]", "[n0_g0 n0_g2 n0_g4 n0_g6]", "[n1_g1 n1_g3 n1_g5 n1_g7]"):
        assert group in text
    # context parallelism is 1, and the experts' data groups are those of the data
    assert "context" not in "\n".join(line for line in text.splitlines() if "groups of" in line)
    assert "edp" not in text


def test_thousands_of_gpus_stay_readable() -> None:
    text = _text(large_report())
    assert len(text.splitlines()) < 200
    assert "2,048 groups of 8 GPUs, tensor (tp)" in text
    assert "… 2,044 more" in text
    assert "n0_g0 … n127_g7" in text
    assert "--info-detail full" in " ".join(text.split())


def test_full_detail_prints_everything() -> None:
    report = large_report()
    text = _text(report, detail="full")
    for kind in ("tp", "pp", "dp_cp"):
        assert all(f"n{ranks[-1] // 8}_g{ranks[-1] % 8}]" in text for ranks in report.groups[kind])
    assert all(f"stage {stage}" in text for stage in range(16))
    assert "layers.125" in text
    assert "--info-detail" not in text
    assert "126 × " not in text


def test_stages_alike_stand_in_one_column() -> None:
    job = make_job(layers=8, pipeline=4)
    report = make_report(job)
    first = report.ranks[1]
    alike = [replace(rank, memory=first.memory, parameters=first.parameters) for rank in report.ranks[1:3]]
    text = _text(replace(report, ranks=(report.ranks[0], *alike, report.ranks[3])))
    header = _section(text, "Memory of each rank")[0]
    assert header.split() == ["stage", "0", "stages", "1–2", "stage", "3"]


def test_the_verdict_says_what_is_missing_and_what_would_help() -> None:
    report = small_report(
        advice=(
            Advice(change="--use-distributed-optimizer", device_bytes=10 * 2**30, saves_bytes=20 * 2**30, fits=True),
            Advice(change="--micro-batch-size 2", device_bytes=11 * 2**30, saves_bytes=19 * 2**30, fits=True),
        )
    )
    missing = replace(report.verdict, fits=False, capacity_bytes=30 * 2**30, headroom_bytes=-(2**29), tightest_rank=0)
    lines = _section(_text(replace(report, verdict=missing)), "Does it fit")
    assert lines[0].startswith("  It does not fit: rank 0 (stage 0) takes 30.45 GiB of 30.00 GiB (H100-80GB); 512.00 MiB")
    assert "    --use-distributed-optimizer" in lines
    assert "      saves 20.00 GiB, the highest-memory rank then takes 10.00 GiB" in lines


def test_without_a_capacity_there_is_no_verdict_and_the_note_says_why() -> None:
    unknown = replace(small_report().verdict, fits=None, gpu=None, capacity_bytes=None, headroom_bytes=None, note="No driver here.")
    lines = _section(_text(small_report(verdict=unknown)), "Does it fit")
    assert lines[0].startswith("  No verdict")
    assert "  No driver here." in lines


def test_one_gpu_has_no_sections_about_others() -> None:
    job = make_job(world_size=1, nodes=1, gpus_per_node=1, tensor=1, pipeline=1, expert_tensor=1)
    report = replace(make_report(job), communication=(), communication_totals={})
    text = _text(report)
    assert "One GPU sends nothing." in text
    assert not re.search(r"── (Pipeline|Data|Tensor) parallelism", text)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def _printed(stream: _Stream) -> str:
    print_report(small_report(), stream=stream)
    return stream.getvalue()


def test_a_file_gets_plain_text_and_a_terminal_the_same_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    in_file, on_terminal = _printed(_Stream()), _printed(_Stream(terminal=True))
    assert "\x1b" not in in_file
    assert "\x1b[1" in on_terminal
    bare = re.sub(r"\x1b\[[\d;]*m", "", on_terminal)
    assert [line.rstrip() for line in bare.splitlines()] == in_file.splitlines()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in _printed(_Stream(terminal=True))


def test_columns_decide_about_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, _printed(_Stream()).splitlines())) == 70
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, _printed(_Stream()).splitlines())) == 200
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert max(map(len, _printed(_Stream()).splitlines())) == 100


def test_an_encoding_without_line_drawing_gets_ascii() -> None:
    text = _printed(_Stream(encoding="ascii"))
    assert text.isascii()
    assert "|- decoder" in text


def test_a_table_that_does_not_fit_becomes_blocks_with_every_cell() -> None:
    rows: list[list[str]] = [["a name", "1,000", "2.00 GiB"]]
    lines: list[Line] = table(("", "calls", "bytes"), rows, align="lrr", width=12)
    assert list(map(plain, lines)) == ["  a name", "    calls  1,000", "    bytes  2.00 GiB"]
