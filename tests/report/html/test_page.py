"""The HTML report in a headless Chromium: its charts have the figures of the JSON report, and it can be used with a keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.command import run
from tests.report.html.pages import LARGEST, LAUNCH, Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("pretrain_*.sh"))


def test_charts_below_the_first_screen_are_drawn_when_they_are_needed(browser: Browser, small: Opened) -> None:
    """While the browser is busy: when they are scrolled to, and to be printed."""
    names = small.drawn()
    found = Opened(browser, small.file, small.document, busy=True)
    assert "memory-chart" in found.drawn()
    assert "cluster-chart" not in found.drawn()
    found.page.locator("#theme").click()
    found.page.locator("#cluster-chart").scroll_into_view_if_needed()
    found.page.wait_for_selector("#cluster-chart svg")
    found.page.locator("#theme").click()
    found.page.pdf()
    assert found.drawn() == names
    assert found.messages == []
    found.page.close()


def memory_of(rank: dict[str, Any]) -> list[int]:
    """The parts of a bar of memory, from the report."""
    memory = rank["memory"]
    names = ("parameters", "gradients", "optimizer", "runtime", "activations", "transient")
    return [*(memory[f"{name}_bytes"] for name in names), memory["device_bytes"] - memory["peak_allocated_bytes"]]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_page_of_each_example(example: str, opened: Callable[..., Opened], tab: Page) -> None:
    """No error, no request, a size below 2 MB, and charts with the figures of the report."""
    found = opened(str(ROOT / "examples" / f"{example}.sh"), "--info-gpu", "H100-80GB", tab=tab)
    assert found.messages == []
    assert found.requests == [found.file.as_uri()]
    assert found.file.stat().st_size < LARGEST
    check_charts(found)


def without_zeros(rows: list[list[int]]) -> list[list[int]]:
    """The rows without the columns that are zero in all of them."""
    return [list(row) for row in zip(*(column for column in zip(*rows, strict=True) if any(column)), strict=True)]


def check_charts(found: Opened) -> None:
    document = found.document
    series = found.series("memory-chart")
    bars = [[mark[-1] for mark in each["marks"]] for each in series]
    assert [list(bar) for bar in zip(*bars, strict=True)] == without_zeros([memory_of(rank) for rank in document["ranks"]])
    drawn = [
        (size, height)
        for each, sizes in zip(series, bars, strict=True)
        for size, height in zip(sizes, each["heights"], strict=True)
    ]
    largest, pixels = max(drawn)
    assert pixels > 1
    assert all(height == pytest.approx(pixels * size / largest, abs=0.01) for size, height in drawn)
    drawn_spans = check_schedule(found)
    [parts] = found.series("time-chart")
    spent = [seconds for seconds in document["time"]["parts_seconds"].values() if seconds]
    assert [mark[-1] for mark in parts["marks"]] == pytest.approx(spent)
    passes = [mark for series in drawn_spans[:2] for mark in series["marks"]]
    for stage, line in enumerate(document["time"]["timelines"]):
        spans = [span[:2] for span in line["spans"][:8]]
        drawn_passes = sorted(mark[1:3] for mark in passes if mark[0] == stage)[: len(spans)]
        assert [*chain.from_iterable(drawn_passes)] == pytest.approx([*chain.from_iterable(spans)])


def check_schedule(found: Opened) -> list[dict[str, Any]]:
    """On the stage that finishes last, bubble, exposed messages and the optimizer step take as long as in the report.

    Returns the series of the chart.
    """
    time = found.document["time"]
    found.page.evaluate(
        "echarts.getInstanceByDom(document.getElementById('schedule-chart')).dispatchAction({type: 'dataZoom', start: 0, end: 100})"
    )
    drawn = found.series("schedule-chart")
    seconds = {series["name"]: 0.0 for series in drawn}
    for series in drawn:
        seconds[series["name"]] += sum(mark[2] - mark[1] for mark in series["marks"] if mark[0] == time["pipeline_rank"])
    if "optimizer step" not in seconds:
        return drawn  # an iteration that is shortened
    parts, precise = time["parts_seconds"], {"rel": 1e-3, "abs": 1e-4 * time["iteration_seconds"]}
    within = "exposed communication within a pass"
    assert seconds.get(within, 0.0) == pytest.approx(sum(parts[f"exposed_{kind}"] for kind in ("tp", "cp", "ep")), **precise)
    assert seconds.get("exposed message between stages", 0.0) == pytest.approx(parts["exposed_pp"], **precise)
    assert seconds.get("bubble", 0.0) == pytest.approx(parts["bubble"], **precise)
    assert seconds.get("exposed data-parallel communication", 0.0) == pytest.approx(parts["exposed_dp"], **precise)
    assert seconds["optimizer step"] == pytest.approx(parts["optimizer"], **precise)
    return drawn


def test_the_charts_have_the_figures_of_the_report(small: Opened) -> None:
    check_charts(small)
    assert small.messages == []
    assert small.requests == [small.file.as_uri()]
    document = small.document
    line = [mark[1] for series in small.series("over-chart") for mark in series["marks"]]
    rank = max(document["ranks"], key=lambda each: each["memory"]["device_bytes"])
    assert max(line) <= rank["memory"]["peak_allocated_bytes"]
    assert max(line) >= 0.98 * rank["memory"]["peak_allocated_bytes"]
    matrix = {(mark[1], mark[0]): mark[2] for series in small.series("matrix-chart") for mark in series["marks"]}
    for stage in range(4):
        own = [row for row in document["communication"] if row["pipeline_rank"] == stage]
        assert matrix[stage, stage] == sum(row["bytes_per_iteration"] for row in own if row["peer"] is None)
        if stage < 3:
            assert matrix[stage, stage + 1] == sum(row["bytes_per_iteration"] for row in own if row["peer"] == "next")


def figures(found: Opened, section: str) -> list[list[str]]:
    """The cells of the folded table of a section."""
    rows = found.page.locator(f"#{section} details tbody tr")
    return [row.locator("th, td").all_text_contents() for row in rows.all()]


def test_a_table_repeats_the_schedule(small: Opened) -> None:
    """The stage that finishes last has the parts of the report, and each stage the sums of its spans in the chart."""
    time = small.document["time"]
    parts = time["parts_seconds"]
    rows = figures(small, "schedule")
    within = sum(parts[f"exposed_{kind}"] for kind in ("tp", "cp", "ep"))
    host = parts["host"] - small.page.evaluate("extra.schedule.host")
    busy = parts["gemm"] + parts["attention"] + parts["memory_bound"] + within + host
    expected = [busy, within, parts["bubble"], parts["exposed_pp"], parts["exposed_dp"]]
    assert rows[time["pipeline_rank"]][1:] == small.page.evaluate("(values) => values.map(seconds)", expected)
    passes = small.page.evaluate("extra.passes")
    names = [None, "exposed communication within a pass", "bubble", "exposed message between stages"]
    names.append("exposed data-parallel communication")
    for stage, row in enumerate(rows):
        assert row[0] == f"stage {stage}"
        spans = small.page.evaluate("(stage) => around(extra.passes[stage], stage)", stage)
        sums = [sum(end - start for _, start, end, kind in spans if kind == name) for name in names]
        sums[0] = sum(end - start for start, end, *_ in passes[stage])
        assert small.page.evaluate("(stage) => extra.schedule.stages[stage]", stage) == pytest.approx(sums, rel=1e-4, abs=1e-7)


def test_a_table_repeats_the_memory_over_an_iteration(small: Opened) -> None:
    expected = [
        [f"stage {rank['pipeline_rank']}", memory["peak_allocated_bytes"], memory["peak_allocated_first_iteration_bytes"]]
        for rank in small.document["ranks"]
        for memory in [rank["memory"]]
    ]
    rows = figures(small, "over-iteration")
    text = small.page.evaluate("(rows) => rows.map(([name, ...sizes]) => [name, ...sizes.map(bytes)])", expected)
    assert [[row[0], *row[3:5]] for row in rows] == text
    assert [row[5] for row in rows] == [rank["memory"]["peak_at"] for rank in small.document["ranks"]]
    line = [mark[1] for series in small.series("over-chart") for mark in series["marks"]]
    shown = int(small.page.locator("#over-iteration select").input_value())
    assert rows[shown][1:3] == small.page.evaluate("(sizes) => sizes.map(bytes)", [min(line[1::2]), max(line)])


def test_bytes_between_stages_can_be_read_without_a_mouse(small: Opened) -> None:
    """Each cell has its bytes, and the scale of the colors its ends, also in print."""
    texts = small.page.locator("#matrix-chart text").all_text_contents()
    marks = [mark for series in small.series("matrix-chart") for mark in series["marks"]]
    sizes = [small.page.evaluate("(value) => bytes(value)", mark[2]) for mark in marks]
    assert sizes
    assert all(size in texts for size in sizes)
    assert small.page.evaluate("(value) => bytes(value)", max(mark[2] for mark in marks)) in texts
    assert "0 B" in texts


def test_the_tooltip_lists_the_tensors_of_the_microbatches_in_flight(small: Opened) -> None:
    """At the last forward before the first backward of stage 0, as many microbatches as stages have saved their tensors."""
    page, document = small.page, small.document
    page.locator("#over-iteration").get_by_label("Stage", exact=True).select_option("0")
    page.evaluate(
        "echarts.getInstanceByDom(document.getElementById('over-chart'))"
        ".dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: 7})"
    )
    text = page.locator("#over-chart").inner_text()
    assert "forward of microbatch 3, after it" in text
    assert "microbatches in flight (4):" in text
    tree = next(rank for rank in document["ranks"] if rank["pipeline_rank"] == 0)["chunks"][0]["tree"]
    saved = page.evaluate("extra.saved[0][0]")
    assert sum(size for _, size in saved) == tree["saved_bytes"]
    name, size = saved[0]
    assert page.evaluate("([name, size]) => `${name} ${bytes(size)}`", [name, 4 * size]) in text


def test_the_members_of_each_group_are_those_of_the_report(small: Opened) -> None:
    page, document = small.page, small.document
    for kind in ("tp", "dp", "pp", "cp", "ep", "etp", "edp", "dp_cp", "tp_ep"):
        for rank in (0, 5, 15):
            group = next(group for group in document["groups"][kind] if rank in group)
            assert page.evaluate("([kind, rank]) => members(kind, rank)", [kind, rank]) == group


def test_a_group_and_a_stage_can_be_selected(small: Opened) -> None:
    page = small.page
    page.get_by_label("Rank", exact=True).fill("9")
    page.get_by_label("Rank", exact=True).press("Tab")
    page.get_by_label("Group", exact=True).select_option("pp")
    assert page.locator("#cluster-text h3").inner_text() == "Rank 9: node 1, stage 2"
    marked = [mark for series in small.series("cluster-chart") for mark in series["marks"] if mark[2]]
    assert sorted(mark[3] for mark in marked) == [1, 5, 9, 13]
    page.locator("#cluster").get_by_label("Stage", exact=True).select_option("3")
    assert page.locator("#cluster-text h3").inner_text() == "Rank 12: node 1, stage 3"


def test_a_large_cluster_is_folded_into_nodes(opened: Callable[..., Opened], tab: Page) -> None:
    """A square for each of 1,024 nodes, each line of one stage; a selected node shows the GPUs of 64 nodes. The page is small."""
    launch = " ".join(LAUNCH).replace("--nnodes 2", "--nnodes 1024").replace("--global-batch-size 64", "--global-batch-size 4096")
    found = opened(*launch.split(), tab=tab)
    page = found.page
    assert found.messages == []
    assert found.file.stat().st_size < LARGEST
    marks = found.series("cluster-chart")[0]["marks"]
    assert len(marks) == 1024
    assert all(mark[1] // 2 == page.evaluate("stageOf", mark[3]) for mark in marks)
    page.locator("#cluster").get_by_label("Group", exact=True).select_option("pp")
    marks = found.series("cluster-chart")[0]["marks"]
    assert [mark[3:] for mark in marks if mark[2]] == [[rank, 8] for rank in (0, 2048, 4096, 6144)]
    page.get_by_label("GPUs of nodes", exact=True).select_option("128–191")
    page.get_by_label("Rank", exact=True).fill("4097")
    page.get_by_label("Rank", exact=True).press("Tab")
    marks = found.series("cluster-chart")[0]["marks"]
    assert sorted(mark[3] for mark in marks) == [*range(4096, 4608)]
    assert [mark[2:] for mark in marks if mark[2]] == [[2, 4097, 1]]
    page.get_by_label("GPUs of nodes", exact=True).select_option("all, a square for each node")
    x, y = page.evaluate(
        "echarts.getInstanceByDom(document.getElementById('cluster-chart')).convertToPixel({seriesIndex: 0}, [3, 2])"
    )
    page.locator("#cluster-chart").click(position={"x": x, "y": y})
    assert page.locator("#cluster-text h3").inner_text() == "Rank 2072: node 259, stage 1"
    assert page.get_by_label("GPUs of nodes", exact=True).input_value() == "4"
    assert len(found.series("cluster-chart")[0]["marks"]) == 512
    assert found.messages == []


def test_the_tree_expands_and_sorts(small: Opened) -> None:
    page = small.page
    rows = page.locator("#tree tbody tr")
    before = rows.count()
    page.locator("#tree tbody button[aria-expanded=false]").first.press("Enter")
    assert rows.count() > before
    page.get_by_role("button", name="Parameters", exact=True).click()
    assert page.locator("#tree th[aria-sort=descending]").inner_text() == "Parameters"
    rank = max(small.document["ranks"], key=lambda each: each["memory"]["device_bytes"])
    shown = rows.first.locator("td").nth(1).inner_text()
    assert int(shown.replace(",", "")) == rank["chunks"][0]["tree"]["parameters"]
    page.locator("#tree tbody button[aria-expanded=true]").first.click()
    assert rows.count() == 1


def test_the_dark_theme_and_print(small: Opened) -> None:
    page = small.page
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("theme()") == "dark"
    page.get_by_role("button", name="Light theme").click()
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator("#memory-chart").is_visible()
    page.emulate_media(media="screen")
    assert len(page.pdf()) > 10_000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(small: Opened, theme: str) -> None:
    """axe-core finds no serious fault."""
    from axe_playwright_python.sync_playwright import Axe

    small.page.evaluate("(name) => setTheme(name)", theme)
    found = Axe().run(small.page).response["violations"]
    small.page.evaluate("() => setTheme('light')")
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_three_reports_side_by_side(opened: Callable[..., Opened], tab: Page, tmp_path: Path) -> None:
    """Names and texts with markup, as in an older report of someone else, are shown as text."""
    old = tmp_path / "<img src=x onerror=alert(1)>.json"
    run(*LAUNCH, "--info-json", str(old))
    document = json.loads(old.read_text())
    document["warnings"] = ["</script><script>alert(2)</script>"]
    old.write_text(json.dumps(document))
    older = tmp_path / "older.json"
    run(*LAUNCH, "--micro-batch-size", "4", "--info-json", str(older))
    found = opened(*LAUNCH, "--micro-batch-size", "2", "--info-against", str(old), "--info-against", str(older), tab=tab)
    assert found.messages == []
    assert found.page.locator("img").count() == 0
    bars = [[mark[-1] for mark in series["marks"]] for series in found.series("comparison-chart")]
    highest = [
        max(each["ranks"], key=lambda rank: rank["memory"]["device_bytes"])
        for each in (found.document, document, json.loads(older.read_text()))
    ]
    assert [list(bar) for bar in zip(*bars, strict=True)] == without_zeros([memory_of(rank) for rank in highest])
    assert found.page.locator("#comparison thead").first.locator("th").all_inner_texts()[1:] == [
        found.page.locator("h1").inner_text(),
        old.name,
        "older.json",
    ]
