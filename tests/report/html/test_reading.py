"""The HTML report as a reader meets it: without JavaScript, on a phone, with the mouse wheel, on paper; and pages of generation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from analyzer.version import __version__
from tests.command import run
from tests.report.html.pages import LARGEST, LAUNCH, READY, Opened, embedded

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[3]
GENERATION = (
    "--info-model meta-llama/Llama-3.1-8B --info-world-size 4 --pipeline-model-parallel-size 2 --info-gpu H100-80GB "
    "--info-inference batch=8,prompt=2048,generate=256 --info-price 2"
).split()
SEARCH = (*LAUNCH, "--info-search", "--info-search-over", "tp", "--info-workers", "1")
PAGE_HEIGHT = (297 - 2 * 12) / 25.4 * 96
"""CSS pixels of the content of a printed page: A4 with the margins of the style sheet."""


@pytest.fixture(scope="module")
def generation(opened: Callable[..., Opened]) -> Opened:
    return opened(*GENERATION)


@pytest.fixture(scope="module")
def searched(opened: Callable[..., Opened]) -> Opened:
    return opened(*SEARCH)


def test_the_head_is_there_without_javascript(browser: Browser, small: Opened) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(small.file.as_uri())
    report, time = small.document, small.document["time"]
    facts = {each.locator("dt").inner_text(): each.locator("dd").inner_text() for each in page.locator(".facts > div").all()}
    assert facts["layout"].startswith("16 GPUs (2 nodes of 8): TP2 PP4 DP2, distributed optimizer")
    assert facts["batch"].startswith("Micro-batch size 1, global batch size 64: ")
    assert facts["batch"].endswith("sequence length 2,048")
    assert f"{time['iteration_seconds'] * 1e3:,.0f} ms (likely " in facts["iteration"]
    assert re.fullmatch(rf"get-training-info {re.escape(__version__)}, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC", facts["report"])
    cards = {each.locator("dt").inner_text(): each.locator("dd").inner_text() for each in page.locator(".cards > div").all()}
    most = max(rank["memory"]["device_bytes"] for rank in report["ranks"])
    assert cards["GPUs"] == "16"
    assert cards["Memory of the highest-memory rank"] == f"{most / 2**30:.2f} GiB"
    assert cards["Tokens/s/GPU"] == f"{time['tokens_per_second_per_gpu']:,.0f}"
    assert page.locator("#verdict").inner_text().startswith("It fits: rank ")
    page.locator("summary", has_text="Command").click()
    assert page.locator("#command").inner_text().startswith("get-training-info --nnodes 2 ")
    assert page.locator("noscript").inner_text() == "The charts need JavaScript."
    assert not any(button.is_visible() for button in page.locator("button").all())
    context.close()


def test_the_head_names_the_model_and_the_tokens(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    model = "--info-model meta-llama/Llama-3.1-8B --info-world-size 8 --tensor-model-parallel-size 2 --info-gpu H100-80GB"
    assert run(*model.split(), "--info-tokens", "1B", "--info-html", str(file)).status == 0
    text = file.read_text()
    assert "<title>Llama-3.1-8B on 8 × H100-80GB</title>" in text
    facts = dict(re.findall(r"<dt>(.+?)</dt><dd>\s*(.+?)\s*</dd>", text, re.DOTALL))
    assert facts["model"].startswith("Llama-3.1-8B: GPT, 32 layers, ")
    samples = -(-(10**9) // 4096)
    assert facts["tokens"] == f"{samples * 4096:,} in {samples // 4:,} iterations"


def test_the_head_names_the_model_of_the_tokenizer(tmp_path: Path) -> None:
    """If the launch has its size; otherwise the title has the size."""
    file = tmp_path / "page.html"
    of_tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/Meta-Llama-3-8B/".split()
    launch = " ".join(LAUNCH).replace("--tokenizer-type NullTokenizer", "").split()
    for sizes, name in (
        ("--num-layers 32 --hidden-size 4096", "Meta-Llama-3-8B"),
        ("--num-layers 16 --hidden-size 4096", r"\d\.\d billion parameters \(16 layers × 4,096\)"),
    ):
        assert run(*launch, *of_tokenizer, *sizes.split(), "--info-html", str(file)).status == 0
        assert re.search(f"<title>{name} on 16 × H100-80GB</title>", file.read_text())


def test_the_wheel_scrolls_the_page_and_zooms_with_the_control_key(small: Opened) -> None:
    page = small.page
    for chart in ("over-chart", "schedule-chart"):
        point_at(small, chart)
        shown = f"echarts.getInstanceByDom(document.getElementById('{chart}')).getOption().dataZoom[0]"
        before = page.evaluate(f"[scrollY, {shown}.startValue, {shown}.endValue]")
        page.mouse.wheel(0, -200)
        page.wait_for_function("(before) => scrollY < before", arg=before[0])
        assert page.evaluate(f"[{shown}.startValue, {shown}.endValue]") == before[1:]
        point_at(small, chart)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        page.wait_for_function(f"(before) => {shown}.startValue !== before[1] || {shown}.endValue !== before[2]", arg=before)
    page.evaluate("redraw()")
    assert small.messages == []


def point_at(found: Opened, chart: str) -> None:
    """Scrolls to a chart and moves the mouse to its middle."""
    found.page.locator(f"#{chart}").scroll_into_view_if_needed()
    box = found.page.locator(f"#{chart}").bounding_box()
    assert box is not None
    found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def test_a_button_shows_the_whole_iteration(small: Opened) -> None:
    page = small.page
    end = "echarts.getInstanceByDom(document.getElementById('schedule-chart')).getOption().dataZoom[0].endValue"
    button = page.locator("#schedule").get_by_role("button", name="Whole iteration")
    button.press("Enter")
    assert page.evaluate(end) == pytest.approx(small.document["time"]["iteration_seconds"], rel=1e-6)
    assert button.get_attribute("aria-pressed") == "true"
    button.press("Enter")


def test_axes_begin_at_zero_and_zero_parts_are_hidden(small: Opened) -> None:
    for chart in ("memory-chart", "over-chart", "time-chart"):
        least = small.page.evaluate(
            """(id) => ["xAxis", "yAxis"].map((name) =>
                echarts.getInstanceByDom(document.getElementById(id)).getModel().getComponent(name).axis.scale.getExtent()[0])""",
            chart,
        )
        assert least == [0, 0], chart
    rows = small.page.locator("#time details tbody tr").all()
    times = [row.locator("td").first.text_content() for row in rows]
    assert len(times) > 4
    assert "0.00 s" not in times
    sizes = [row.locator("td").first.text_content() for row in small.page.locator("#cluster-text tbody tr").all()]
    assert sizes
    assert "1" not in sizes


def test_tooltips_are_short(small: Opened) -> None:
    page = small.page
    page.evaluate(
        "echarts.getInstanceByDom(document.getElementById('over-chart'))"
        ".dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: 8})"
    )
    lines = page.locator("#over-chart > div").last.inner_text().splitlines()
    assert 4 <= len(lines) <= 10


def test_a_narrow_page(browser: Browser, small: Opened) -> None:
    """At 390 px nothing is wider than the page, no legend covers a chart, and no name of an option is broken."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(small.file.as_uri())
    page.wait_for_function(READY)
    page.evaluate("showAll()")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for chart in ("memory-chart", "schedule-chart"):
        legend = page.locator(f".legend:has(+ #{chart})").bounding_box()
        box = page.locator(f"#{chart}").bounding_box()
        assert legend is not None
        assert box is not None
        assert legend["y"] + legend["height"] <= box["y"]
    page.locator("summary", has_text="Command").click()
    broken = page.evaluate(
        """[...document.querySelectorAll('.option')].filter((each) => each.getClientRects().length > 1)
            .map((each) => each.textContent)"""
    )
    assert page.locator(".option").count() > 15
    assert broken == []
    page.close()


def test_a_legend_hides_a_series(small: Opened) -> None:
    def drawn() -> set[str]:
        """The series that are not switched off."""
        names: list[str] = small.page.evaluate(
            """() => {
                const found = [];
                const chart = echarts.getInstanceByDom(document.getElementById("memory-chart"));
                chart.getModel().eachSeries(({name}) => found.push(name));
                return found;
            }"""
        )
        return {*names}

    button = small.page.locator("#memory .legend").get_by_role("button", name="activations", exact=True)
    assert "activations" in drawn()
    button.press("Enter")
    assert "activations" not in drawn()
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert "activations" in drawn()


def test_printed_pages_are_full(small: Opened) -> None:
    """The pages have room for little more than the content, so none but the last can be three quarters empty."""
    page = small.page
    pdf = page.pdf(prefer_css_page_size=True)
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    height = page.evaluate("document.body.scrollHeight")
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".printing").count() == 0
    assert 2 <= pages <= 1 + height / PAGE_HEIGHT + 0.75
    assert page.locator("details[open]").count() == 0


def test_the_json_report_can_be_saved_and_read_from_the_file(small: Opened) -> None:
    with small.page.expect_download() as waiting:
        small.page.get_by_role("button", name="Save the JSON report").click()
    assert json.loads(waiting.value.path().read_text()) == small.document
    assert json.loads(embedded(small.file.read_text(), "reports"))["documents"] == [small.document]


@pytest.mark.slow
def test_the_gain_of_a_search_is_at_the_top(searched: Opened) -> None:
    page, search = searched.page, searched.document["search"]
    gain = 1 - search["best"][0]["iteration_seconds"] / search["given"]["iteration_seconds"]
    assert f"{gain:.1%} less time than the launch" in page.locator("#gain p").first.inner_text()
    assert page.locator("#gain-command").text_content() == search["commands"][0]
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text; }}})")
    page.get_by_role("button", name="Copy the command", exact=True).click()
    page.wait_for_function("window.copied !== undefined")
    assert page.evaluate("copied") == search["commands"][0]
    assert page.locator("#gain [role=status]").inner_text() == "Copied."
    above = page.locator("#gain").bounding_box()
    below = page.locator("#summary").bounding_box()
    assert above is not None
    assert below is not None
    assert above["y"] < below["y"]
    assert searched.messages == []
    layouts = searched.series("search-chart")
    assert {mark[0] for each in layouts for mark in each["marks"]} >= {each["iteration_seconds"] for each in search["best"]}


def test_the_page_of_generation(generation: Opened) -> None:
    document = generation.document
    assert generation.messages == []
    assert generation.requests == [generation.file.as_uri()]
    bars = [[mark[-1] for mark in each["marks"]] for each in generation.series("memory-chart")]
    assert [sum(bar) for bar in zip(*bars, strict=True)] == [rank["memory"]["device_bytes"] for rank in document["ranks"]]
    [batches] = generation.series("batches-chart")
    assert [mark[-1] for mark in batches["marks"]] == [each["tokens_per_second"] for each in document["inference"]["batches"]]
    cards = {
        each.locator("dt").inner_text(): each.locator("dd").inner_text() for each in generation.page.locator(".cards > div").all()
    }
    assert cards["Largest batch"] == f"{document['inference']['max_batch']:,}"
    assert cards["Tokens/s"] == f"{document['inference']['tokens_per_second']:,.0f}"
    assert accessible(generation, "dark")


@pytest.mark.slow
def test_the_page_of_serving(opened: Callable[..., Opened], tab: Page) -> None:
    """Marks and key figures are those of the report: numbers of clients, and the layouts of a search."""
    found = opened(
        *"--info-model meta-llama/Llama-3.1-8B --info-world-size 4 --tensor-model-parallel-size 2 --info-gpu H100-80GB".split(),
        *"--info-inference batch=16,prompt=512,generate=128 --info-serving-engine vllm --info-price 2".split(),
        *"--info-serving-search first=200ms,token=8ms".split(),
        tab=tab,
    )
    serving = found.document["inference"]["serving"]
    assert found.messages == []
    clients, given = found.series("clients-chart")
    points = [[each["token_seconds"], each["tokens_per_second"]] for each in serving["clients"]]
    assert [mark[:2] for mark in clients["marks"]] == points
    assert [mark[:2] for mark in given["marks"]] == [[serving["given"]["token_seconds"], serving["given"]["tokens_per_second"]]]
    front, choices = found.series("layouts-chart")
    assert serving["choices"]
    for series, layouts in ((front, serving["front"]), (choices, serving["choices"])):
        expected = [[each["time"]["token_seconds"], each["time"]["tokens_per_second"] / each["gpus"]] for each in layouts]
        assert [mark[:2] for mark in series["marks"]] == [pytest.approx(each) for each in expected]
    cards = {each.locator("dt").inner_text(): each.locator("dd").inner_text() for each in found.page.locator(".cards > div").all()}
    assert cards["Tokens/s"] == f"{serving['given']['tokens_per_second']:,.0f}"
    assert cards["Cost of a million tokens"] == f"{serving['given']['cost_per_million_tokens']:,.2f}"
    assert accessible(found, "light")


@pytest.mark.slow
def test_the_page_of_generation_with_offloading(opened: Callable[..., Opened], tab: Page) -> None:
    policy = "weights=20/80/0,cache=0/100/0,activations=0/100/0"
    found = opened(
        *"--info-model facebook/opt-30b --info-gpu T4 --info-world-size 1 --info-inference batch=64,prompt=512,generate=32".split(),
        "--info-offload",
        policy,
        tab=tab,
    )
    tier = found.document["inference"]["policy"]["tiers"][0]
    assert found.messages == []
    cells = found.page.locator("#placement tr", has_text="sum").locator("td").first.inner_text()
    assert cells == f"{tier['total_bytes'] / 2**30:.2f} GiB"
    assert accessible(found, "light")


def accessible(found: Opened, theme: str) -> bool:
    """Whether axe-core finds no serious fault in a theme."""
    from axe_playwright_python.sync_playwright import Axe

    found.page.evaluate("(name) => setTheme(name)", theme)
    violations = Axe().run(found.page).response["violations"]
    assert [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("pretrain_llama3_405b_1024gpus", "--global-batch-size 2048"),
        ("pretrain_deepseek_v3", "--global-batch-size 16384"),
    ],
)
def test_pages_of_16_384_gpus_are_small(script: str, options: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    launch = [str(ROOT / "examples" / f"{script}.sh"), "--info-gpu", "H100-80GB", "--info-world-size", "16384", *options.split()]
    assert run(*launch, "--info-html", str(file)).status in (0, 1)
    assert file.stat().st_size < LARGEST
