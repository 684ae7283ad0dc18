"""Pages of HTML reports in a headless Chromium."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = "() => typeof charts !== 'undefined'"
"""Whether the scripts of the page have been decompressed and have run."""
LARGEST = 2_000_000
"""Bytes of a page."""
ALL_DRAWN = """new Promise((done) => {
    const look = () => (charts.every(({made}) => made !== null) ? done() : setTimeout(look, 10));
    look();
})"""
LAUNCH = (
    "--nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --use-distributed-optimizer "
    "--info-gpu H100-80GB"
).split()


def embedded(page: str, name: str) -> str:
    """The text of a document in a page: reports or extra."""
    [packed] = re.findall(rf'<script type="application/gzip" id="{name}">(.+?)</script>', page)
    return gzip.decompress(base64.b64decode(packed)).decode()


class Opened:
    """A page in the browser with all charts, with what it reports and requests, and the JSON report that it shows.

    With `busy` the browser never has time for the charts below the first screen. `tab`: a tab that showed another page before, in
    which the library is not compiled again.
    """

    def __init__(
        self, browser: Browser, file: Path, document: dict[str, Any], *, busy: bool = False, tab: Page | None = None
    ) -> None:
        self.file, self.document = file, document
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page: Page = tab or browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        if busy:
            self.page.add_init_script("window.requestIdleCallback = () => 0;")
        self.page.goto(file.as_uri())
        self.page.wait_for_function(READY)
        if not busy:
            self.page.evaluate(ALL_DRAWN)

    def drawn(self) -> list[str]:
        """The names of the charts that are drawn."""
        found: list[str] = self.page.evaluate("charts.filter(({made}) => made !== null).map(({id}) => id)")
        return found

    def series(self, chart: str) -> list[dict[str, Any]]:
        """The series of a chart as ECharts draws them: name, for each mark its values, and the height of a bar in pixels."""
        text: str = self.page.evaluate(
            """(id) => {
                const chart = echarts.getInstanceByDom(document.getElementById(id));
                return JSON.stringify(chart.getModel().getSeries().map((series) => {
                    const data = series.getData();
                    const places = [...Array(data.count()).keys()];
                    const marks = places.map((place) => [series.getRawValue(place)].flat());
                    const heights = places.map((place) => Math.abs((data.getItemLayout(place) || {}).height || 0));
                    return {name: series.name, marks, heights};
                }));
            }""",
            chart,
        )
        found: list[dict[str, Any]] = json.loads(text)
        return found
