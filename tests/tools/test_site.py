"""The documentation site: links of its pages, and the example of the API page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from analyzer.cli.commands.table import COMMANDS, COMMON, fields_of, flag_of_field
from analyzer.launch.info_options import FLAGS
from tests.browser import chromium
from tools.site_pages import commands, rewritten

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[2]


def test_links_lead_to_pages_and_other_files_become_text() -> None:
    assert rewritten("[JSON](docs/json.md#x)", "README.md") == "[JSON](json.md#x)"
    assert rewritten("[back](../README.md)", "docs/json.md") == "[back](index.md)"
    assert rewritten("[format](FORMAT.md)", "allocator_hook/README.md") == "[format](trace-format.md)"
    assert rewritten("[code](../setup.cfg)", "docs/json.md") == "code"
    assert rewritten("[gone](nothing.md)", "README.md") == "[gone](nothing.md)"
    assert rewritten("[far](https://example.org/a)", "README.md") == "[far](https://example.org/a)"
    assert rewritten("```\n[JSON](docs/json.md)\n```\n", "README.md") == "```\n[JSON](docs/json.md)\n```\n"
    assert rewritten("[JSON](../json.md)", "docs/howto/fit.md") == "[JSON](../json.md)"
    assert rewritten("[safe](../../SECURITY.md#x)", "docs/howto/fit.md") == "[safe](../security.md#x)"
    assert rewritten("[fit](howto/fit.md)", "docs/index.md") == "[fit](howto/fit.md)"


def test_options_stand_on_their_page() -> None:
    """Each option has a row in docs/options.md, and each command a section in the generated page, with its options."""
    rows = re.findall(r"^\| `(--info-[a-z-]+)", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(FLAGS)
    page = commands()
    for name in COMMANDS:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert COMMANDS[name].help in section
        for field in fields_of(name):
            assert f"| `{flag_of_field(field)}" in (page if field in COMMON else section), (name, field)


def test_a_workflow_builds_and_publishes_the_site() -> None:
    """It runs targets of the Makefile, and publishes the folder that they write to."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    commands_ = "\n".join(step.get("run", "") for step in steps)
    subprocess.run(["bash", "-n", "-c", commands_], check=True)
    assert "make docs\n" in commands_
    [kept] = (step for step in steps if step.get("uses", "").startswith("actions/upload-pages-artifact@"))
    assert kept["with"]["path"] == yaml_value("site_dir")
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert kept["if"] == workflow["jobs"]["publish"]["if"] == "github.ref == 'refs/heads/main'"


def yaml_value(name: str) -> str:
    """A value of mkdocs.yml, which has tags that are only known to mkdocs."""
    [found] = re.findall(rf"^{name}: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, served from this machine."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def first_page(site: str, browser: Browser) -> Page:
    """The first page with the search open: its index is built once."""
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.goto(site)
    opened.locator(".md-search__input").click()
    return opened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("how many GPUs", "howto/gpus/"),
        ("cost", "howto/time-and-cost/"),
        ("tight", "howto/fit/"),
        ("prolog", "howto/slurm/"),
        ("longest sequence", "howto/context/"),
        ("out of memory", "howto/oom/"),
        ("notebook", "howto/notebook/"),
    ],
)
def test_the_search_of_the_site_finds_the_page(words: str, page: str, site: str, first_page: Page) -> None:
    """Among the first three results, in the search box of the site."""
    box = first_page.locator(".md-search__input")
    box.fill("")
    first_page.wait_for_selector(".md-search-result__item", state="detached")
    box.fill(words)
    box.press("End")  # the search runs when a key is released, so once for all words
    first_page.wait_for_selector(".md-search-result__item")
    found = first_page.locator(".md-search-result__link").evaluate_all("(links) => links.map((each) => each.href)")
    places = list(dict.fromkeys(each.removeprefix(site).partition("?")[0].partition("#")[0] for each in found))
    assert page in places[:3], places[:6]


def _keep(found: list[str], name: str, event: object) -> None:
    """Adds an attribute of an event to a list."""
    found.append(getattr(event, name))


@pytest.mark.slow
def test_the_first_page_is_one_screen_without_requests_to_others(site: str, browser: Browser) -> None:
    for width, height in ((1440, 900), (390, 844)):
        opened = browser.new_page(viewport={"width": width, "height": height})
        requests: list[str] = []
        messages: list[str] = []
        opened.on("request", partial(_keep, requests, "url"))
        opened.on("console", partial(_keep, messages, "text"))
        opened.goto(site)
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        if width == 1440:
            last = opened.locator("article p").last.bounding_box()
            assert last is not None
            assert last["y"] + last["height"] <= height
        assert {url.startswith(site) for url in requests} == {True}
        assert messages == []
        opened.close()


def test_the_tests_have_one_command() -> None:
    """What README and CONTRIBUTING name is what CI runs."""
    for file in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        assert "make test" in (ROOT / file).read_text(), file


def test_packages_of_the_analyzer_stand_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.stem for path in (ROOT / "analyzer").iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert not {name for name in packages - {"__init__"} if f"`{name}`" not in text}
