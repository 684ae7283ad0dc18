"""A headless Chromium, and the pages of launches in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import chromium
from tests.command import run
from tests.report.html.pages import LAUNCH, Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="package")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Opened]]:
    """Opens the page of a launch, in a tab of its own unless one is given."""
    pages: list[Opened] = []

    def of(*argv: str, tab: Page | None = None) -> Opened:
        folder = tmp_path_factory.mktemp("html")
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTHONPATH", raising=False)  # would be a part of the command
            outcome = run(*argv, "--info-html", str(folder / "page.html"), "--info-json", str(folder / "report.json"))
        assert outcome.status in (0, 1), outcome.err
        document = json.loads((folder / "report.json").read_text())
        found = Opened(browser, folder / "page.html", document, tab=tab)
        if tab is None:
            pages.append(found)
        return found

    yield of
    for each in pages:
        each.page.close()


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Page]:
    """A tab for pages that only one test needs."""
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    yield found
    found.close()


@pytest.fixture(scope="package")
def small(opened: Callable[..., Opened]) -> Opened:
    return opened(*LAUNCH)
