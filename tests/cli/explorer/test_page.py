"""The explorer in a headless Chromium, with both backends.

Its figures are those of the command line, it can be used with a keyboard, and it requests its own files only.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analyzer.cli.explorer.server import ExplorerServer
from tests.browser import chromium
from tests.cli.explorer.known import known_report as report
from tools.build_explorer import build, npm_package

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("pretrain_*.sh"))
LLAMA = (
    "meta-llama/Llama-3.1-8B --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--global-batch-size 64"
)
SMALL = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --tensor-model-parallel-size 4"
)
MOE = "mistralai/Mixtral-8x7B-v0.1 --expert-model-parallel-size 4 --pipeline-model-parallel-size 4 --global-batch-size 64"
WAIT = 150_000
CHANGES = (
    ("gpus", "64"), ("tensor", "1"), ("pipeline", "4"), ("virtual", "2"), ("context", "2"), ("micro_batch", "2"),
    ("global_batch", "128"), ("sequence", "16384"), ("recompute", "full, uniform, 1 layer"), ("precision", "delayed"),
)  # fmt: skip
OF_SERVER = ("pretrain_deepseek_v3", "pretrain_llama3_8b")
"""Scripts for the page with the local server, whose answers are compared for all scripts in test_answer.py."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class _Files(http.server.SimpleHTTPRequestHandler):
    """Any web server with static files."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module", params=["server", "pyodide"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page: of the local server, and of static files with Pyodide."""
    if request.param == "server":
        server = ExplorerServer(0, None)
        address = server.url
    else:
        if npm_package() is None:
            if os.environ.get("CI"):
                pytest.fail("CI must have npm")
            pytest.skip("needs npm, which fetches Pyodide: apt install npm")
        folder = tmp_path_factory.mktemp("site") / "explore"
        build(folder)
        handler = functools.partial(_Files, directory=str(folder.parent))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)  # type: ignore[assignment]
        address = f"http://127.0.0.1:{server.server_port}/explore/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


class Opened:
    """The page in the browser, with what it reports and requests."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1440, hash: str = "", dark: bool = False) -> None:
        self.url = url
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
        self.context.on("request", lambda request: self.requests.append(request.url))  # those of workers too
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        started = time.monotonic()
        self.page.goto(f"{url}{hash}")
        self.page.wait_for_selector("html[data-shown]", timeout=WAIT)
        self.seconds = time.monotonic() - started

    @property
    def shown(self) -> int:
        return int(self.page.locator("html").get_attribute("data-shown") or 0)

    def wait(self, before: int) -> None:
        """Waits until a newer version is shown, with its controls and schedule."""
        error = self.page.evaluate(
            """([before, most]) => new Promise((done) => {
                const root = document.documentElement;
                const end = (text) => { observer.disconnect(); clearTimeout(timer); done(text); };
                const look = () => { if (Number(root.dataset.shown ?? 0) > before) end(null); };
                const observer = new MutationObserver(look);
                const timer = setTimeout(() => end(document.getElementById("error").textContent || "no answer"), most);
                observer.observe(root, {attributes: true});
                look();
            })""",
            [before, WAIT],
        )
        assert error is None

    def analyze(self, text: str) -> None:
        before = self.shown
        self.page.get_by_label("A launch command").fill(text)
        self.page.get_by_role("button", name="Analyze").click()
        self.wait(before)

    def chip(self, control: str, value: str) -> Locator:
        return self.page.locator(f'[data-control="{control}"] [data-value="{value}"]')

    def choose(self, control: str, value: str) -> None:
        before = self.shown
        self.chip(control, value).click()
        self.wait(before)

    def command(self) -> list[str]:
        """The words of the command line of the version that is shown."""
        text = self.page.get_by_role("region", name="Command line of this program").inner_text()
        words = shlex.split(text)
        assert words[0] == "get-training-info"
        return words[1:]

    def series(self, chart: str) -> dict[str, list[Any]]:
        """The values of each series of a chart, as ECharts draws them."""
        found: dict[str, list[Any]] = self.page.evaluate(
            """(id) => Object.fromEntries(echarts.getInstanceByDom(document.getElementById(id)).getModel().getSeries()
            .map((series) => {
                const data = series.getData();
                return [series.name, [...Array(data.count()).keys()].map((place) => series.getRawValue(place))];
            }))""",
            chart,
        )
        return found

    def cells(self, table: str) -> list[list[str]]:
        found: list[list[str]] = self.page.evaluate(
            """(name) => [...document.querySelectorAll(`.scroll[aria-label="${name}"] tbody tr`)]
            .map((row) => [...row.querySelectorAll("th, td")].map((cell) => cell.textContent))""",
            table,
        )
        return found


@pytest.fixture(scope="module")
def page_of_module(browser: Browser, url: str) -> Iterator[Opened]:
    found = Opened(browser, url)
    yield found
    found.context.close()


@pytest.fixture
def opened(page_of_module: Opened) -> Iterator[Opened]:
    """The page, which must report no error and request nothing but its own files."""
    yield page_of_module
    assert page_of_module.messages == []
    assert [each for each in page_of_module.requests if not each.startswith(page_of_module.url)] == []
    assert any("echarts" in each for each in page_of_module.requests)


PARTS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states", "runtime": "workspaces and caches",
    "activations": "saved activations", "transient": "temporary tensors",
}  # fmt: skip


def size(value: int) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    number, unit = float(value), 0
    while number >= 1024:
        number, unit = number / 1024, unit + 1
    return f"{number:.2f} {units[unit]}" if unit else f"{value} B"


def duration(value: float) -> str:
    number, unit = (value, "s") if value >= 1 or value == 0 else (1e3 * value, "ms") if value >= 1e-3 else (1e6 * value, "µs")
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def check_figures(found: Opened, document: dict[str, Any]) -> None:
    """Every figure of the page, in text, tables and charts, is that of a JSON report."""
    stages: dict[int, dict[str, Any]] = {}
    for rank in document["ranks"]:
        stage, memory = rank["pipeline_rank"], rank["memory"]
        if stage not in stages or stages[stage]["device_bytes"] < memory["device_bytes"]:
            stages[stage] = memory
    bars = found.series("memory-chart")
    rest = "reserved, and outside of PyTorch"
    expected = {name: [stages[stage][f"{field}_bytes"] for stage in sorted(stages)] for field, name in PARTS.items()}
    expected[rest] = [stages[stage]["device_bytes"] - stages[stage]["peak_allocated_bytes"] for stage in sorted(stages)]
    assert bars == expected
    rows = [
        [f"stage {stage}", *(size(expected[name][place]) for name in (*PARTS.values(), rest)), size(stages[stage]["device_bytes"])]
        for place, stage in enumerate(sorted(stages))
    ]
    assert found.cells("Figures of the memory") == rows
    highest, verdict = max(each["device_bytes"] for each in stages.values()), document["verdict"]
    keys = found.page.locator("#keys dd").all_text_contents()
    assert keys[0] == f"{size(highest)}of {size(verdict['capacity_bytes'])}"
    text = found.page.locator("#verdict").inner_text()
    words = {"fits": "It fits", "tight": "It is tight", "does not fit": "It does not fit"}
    assert text.startswith("No verdict" if verdict["withheld"] else words[verdict["state"]])
    if not verdict["withheld"]:
        assert size(highest) in text
    check_time(found, document["time"], keys)
    world, parallel, batch = document["world"], document["parallel"], document["batch"]
    setting = found.page.locator("#setting").inner_text()
    assert f"{document['model']['parameters'] / 1e9:.1f}B parameters on {world['size']:,} × {verdict['gpu']}" in setting
    for name, number in (
        ("TP", parallel["tensor"]),
        ("PP", parallel["pipeline"]),
        ("CP", parallel["context"]),
        ("EP", parallel["expert"]),
    ):
        assert (f"{name} {number}" in setting) == (number > 1)
    assert f"DP {parallel['data']}" in setting
    assert (
        f"Micro-batch {batch['micro']}, global batch {batch['global']:,}, sequences of {batch['sequence_length']:,} tokens"
        in setting
    )
    assert found.page.locator("#about li").all_text_contents()[: len(document["warnings"])] == document["warnings"]


def check_time(found: Opened, time: dict[str, Any], keys: list[str]) -> None:
    parts = {name: value for name, value in time["parts_seconds"].items() if value > 0}
    drawn = [values[0] for values in found.series("time-chart").values()]
    assert drawn == pytest.approx(list(parts.values()))
    shares = [[duration(value), f"{100 * value / time['iteration_seconds']:.1f}%"] for value in parts.values()]
    assert [row[1:] for row in found.cells("Figures of the time")] == shares
    low, high = time["range_seconds"]
    assert keys[1] == f"{duration(time['iteration_seconds'])}{duration(low)} to {duration(high)}"
    assert keys[2].startswith(f"{time['tokens_per_second_per_gpu']:,.0f}")
    assert keys[3].startswith(f"{100 * time['model_flops_utilization']:.1f}%")
    if time["training"] is not None:
        days = time["training"]["days"]
        assert keys[4] == (f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours")


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_figures_of_ten_scripts_are_those_of_the_command_line(opened: Opened, path: Path) -> None:
    if "explore" not in opened.url and path.stem not in OF_SERVER:
        pytest.skip("the answers of the server are compared without a browser")
    opened.analyze(path.read_text())
    check_figures(opened, report(str(path), "--info-gpu", "H100-80GB"))


def test_each_control_changes_the_launch(opened: Opened) -> None:
    """One change after the other."""
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H200 --gpus 32")
    for control, value in CHANGES:
        change(opened, control, value)


def test_the_experts_can_be_split_otherwise(opened: Opened) -> None:
    opened.analyze(f"get-training-info fit {MOE} --gpu H200 --gpus 64")
    change(opened, "expert", "8")


def change(opened: Opened, control: str, value: str) -> None:
    """The figures of a change are those of its command line, and the difference is that of the two versions."""
    before = report(*opened.command())
    opened.choose(control, value)
    assert opened.chip(control, value).get_attribute("aria-checked") == "true"
    after = report(*opened.command())
    assert (after["ranks"], after["time"]) != (before["ranks"], before["time"]), control
    check_figures(opened, after)
    memory = [max(rank["memory"]["device_bytes"] for rank in each["ranks"]) for each in (before, after)]
    seconds = [each["time"]["iteration_seconds"] for each in (before, after)]
    delta = opened.page.locator("#delta").inner_text()
    for difference, text in ((memory[1] - memory[0], size), (seconds[1] - seconds[0], duration)):
        if difference:
            assert f"{'+' if difference > 0 else '−'}{text(abs(difference))}" in delta
    rows = {row[0]: row[1:3] for row in opened.cells("Differences")}
    assert rows.get("time of an iteration", [duration(each) for each in seconds]) == [duration(each) for each in seconds]
    assert rows.get("memory of the highest-memory rank", [size(each) for each in memory]) == [size(each) for each in memory]


def test_another_gpu_and_any_number_can_be_chosen(opened: Opened) -> None:
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 32")
    before = opened.shown
    opened.page.get_by_label("GPU", exact=True).select_option("B200-180GB")
    opened.wait(before)
    box = opened.page.get_by_label("Global batch size, any number")
    before = opened.shown
    box.fill("96")
    box.press("Enter")
    opened.wait(before)
    document = report(*opened.command())
    assert document["verdict"]["gpu"] == "B200-180GB"
    assert document["batch"]["global"] == 96
    check_figures(opened, document)
    box.fill("97")
    box.press("Enter")
    opened.page.wait_for_selector("#error:not([hidden])")
    text = opened.page.locator("#error").inner_text()
    assert "--global-batch-size" in text
    assert text.endswith("The figures are still those of version 3.")


def test_a_refused_choice_is_disabled_with_its_reason(opened: Opened) -> None:
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 8")
    before, text = opened.shown, opened.page.locator("#setting").inner_text()
    chip = opened.chip("tensor", "16")
    assert chip.get_attribute("aria-disabled") == "true"
    chip.click(force=True)
    reason = opened.page.locator("#control-tensor-reason")
    assert "--tensor-model-parallel-size: 8 GPUs cannot be split into groups of 32" in reason.inner_text()
    assert chip.get_attribute("aria-describedby") == reason.get_attribute("id")
    assert opened.shown == before
    assert opened.page.locator("#setting").inner_text() == text


def test_it_can_be_used_with_a_keyboard(opened: Opened) -> None:
    """Tab reaches each control once; arrows move in it, over refused choices too; the focus stays where it was after a change."""
    page = opened.page
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 8")
    page.get_by_label("GPU", exact=True).focus()
    names = []
    for _ in range(14):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.closest('[data-control]')?.dataset.control ?? ''"))
    assert [name for name in dict.fromkeys(names) if name] == [
        "gpus", "tensor", "pipeline", "virtual", "context", "expert", "micro_batch", "global_batch", "sequence", "recompute",
        "precision",
    ]  # fmt: skip
    opened.chip("tensor", "2").focus()
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.value") == "16"
    assert "cannot be split" in page.locator("#control-tensor-reason").inner_text()
    page.keyboard.press("Home")
    before = opened.shown
    page.keyboard.press("Enter")
    opened.wait(before)
    assert page.evaluate("document.activeElement.dataset.value") == "1"
    assert report(*opened.command())["parallel"]["tensor"] == 1
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.value") == "2"
    for button in page.get_by_role("button").all():
        if button.is_visible():
            button.focus()
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_versions_the_link_and_the_back_button(browser: Browser, opened: Opened) -> None:
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 32")
    opened.choose("tensor", "4")
    opened.choose("micro_batch", "2")
    text = opened.page.locator("#setting").inner_text()
    assert len(opened.cells("Versions")) == 3
    assert "TP 2 → 4; micro-batch 1 → 2" in opened.cells("Versions")[2][-1]
    fragment = "#" + opened.page.url.partition("#")[2]
    assert "%22--micro-batch-size%22" in fragment
    before = opened.shown
    opened.page.go_back()
    opened.wait(before)
    assert "Micro-batch 1" in opened.page.locator("#setting").inner_text()
    before = opened.shown
    opened.page.get_by_role("button", name="version 1").click()
    opened.wait(before)
    assert "TP 2" in opened.page.locator("#setting").inner_text()
    if "explore" in opened.url:  # Pyodide is not loaded again
        before = opened.shown
        opened.page.goto(opened.url + fragment)
        opened.wait(before)
        assert opened.page.locator("#setting").inner_text() == text
        return
    again = Opened(browser, opened.url, hash=fragment)
    assert again.page.locator("#setting").inner_text() == text
    assert again.messages == []
    again.context.close()


def test_a_link_that_is_damaged_shows_an_error(opened: Opened) -> None:
    before = opened.page.locator("#setting").inner_text()
    opened.page.goto(f"{opened.url}#launch={LLAMA.split()[0]}&set=%5B")
    opened.page.wait_for_selector("#error:not([hidden])")
    assert "state: " in opened.page.locator("#error").inner_text()
    assert opened.page.locator("#setting").inner_text() == before


def test_a_layout_of_a_search_can_be_taken(opened: Opened) -> None:
    """With the pointer in the chart, and with the keyboard in the table."""
    page = opened.page
    opened.analyze(SMALL)
    page.get_by_role("button", name="Search", exact=True).click()
    page.wait_for_selector("#layouts-chart svg", timeout=WAIT)
    assert "No other layout of these is faster" in page.locator("#search-text").inner_text()
    rows = opened.cells("Layouts that were found")
    x, y = page.evaluate(
        """() => { const chart = echarts.getInstanceByDom(document.getElementById("layouts-chart"));
        return chart.convertToPixel({seriesIndex: 0}, chart.getModel().getSeries()[0].getRawValue(0)); }"""
    )
    before = opened.shown
    page.locator("#layouts-chart").click(position={"x": x, "y": y})
    opened.wait(before)
    document = report(*opened.command())
    assert duration(document["time"]["iteration_seconds"]) == rows[0][1]
    check_figures(opened, document)
    before = opened.shown
    page.get_by_role("button", name=re.compile("^Take ")).nth(1).press("Enter")
    opened.wait(before)
    assert duration(report(*opened.command())["time"]["iteration_seconds"]) == rows[1][1]
    page.get_by_label("for at most").select_option("300")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    assert page.locator("#search-text").inner_text() == "The search was stopped."
    assert page.get_by_role("button", name="Search", exact=True).is_enabled()


def test_texts_are_not_markup(opened: Opened) -> None:
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 8")
    opened.page.get_by_label("A launch command").fill("<img src=x onerror=alert(1)>/<b>x</b>")
    opened.page.get_by_role("button", name="Analyze").click()
    opened.page.wait_for_selector("#error:not([hidden])")
    assert opened.page.locator("img, b").count() == 0


def test_accessibility_and_widths(opened: Opened) -> None:
    """axe-core finds nothing: narrow in the dark theme, wide in the light one. Nothing is wider than the screen."""
    from axe_playwright_python.sync_playwright import Axe

    if "explore" in opened.url:
        pytest.skip("does not depend on the backend")
    page = opened.page
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 32")
    opened.choose("tensor", "4")
    for each in page.locator("summary").all():
        each.click()
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if width == 390 else "light")
        violations = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:150] for node in each["nodes"]][:2]) for each in violations] == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = page.evaluate(
            """[...document.querySelectorAll("svg, canvas, button, select, textarea, pre, p")]
            .filter((each) => !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1)
            .map((each) => each.outerHTML)"""
        )
        assert wide == []


def test_the_dark_theme_follows_the_browser(browser: Browser, url: str) -> None:
    if "explore" in url:
        pytest.skip("does not depend on the backend")
    found = Opened(browser, url, dark=True)
    assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    found.context.close()


def test_print(opened: Opened) -> None:
    page = opened.page
    page.emulate_media(media="print")
    for hidden in ("#launch-form", "#controls", "#search-form", "#theme"):
        assert not page.locator(hidden).is_visible()
    for shown in ("#verdict", "#memory-chart", "#time-chart", "#paste"):
        assert page.locator(shown).is_visible()
    page.emulate_media(media="screen")
    assert len(page.pdf()) > 10_000


def test_the_first_result_and_a_change_are_fast(opened: Opened) -> None:
    """Prints the seconds. A busy machine may need much longer than one that is idle, up to `WAIT`."""
    opened.analyze(f"get-training-info fit {LLAMA} --gpu H100-80GB --gpus 32")
    started = time.monotonic()
    opened.choose("tensor", "4")
    print(json.dumps({"url": opened.url, "first": opened.seconds, "change": time.monotonic() - started}))
