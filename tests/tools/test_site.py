"""The documentation site: links of its pages, and the example of the API page."""

from __future__ import annotations

from pathlib import Path

from tools.site_pages import rewritten

ROOT = Path(__file__).resolve().parents[2]


def test_links_lead_to_pages_and_other_files_become_text() -> None:
    assert rewritten("[JSON](docs/json.md#x)", "README.md") == "[JSON](json.md#x)"
    assert rewritten("[back](../README.md)", "docs/json.md") == "[back](index.md)"
    assert rewritten("[format](FORMAT.md)", "allocator_hook/README.md") == "[format](trace-format.md)"
    assert rewritten("[code](../setup.cfg)", "docs/json.md") == "code"
    assert rewritten("[gone](nothing.md)", "README.md") == "[gone](nothing.md)"
    assert rewritten("[far](https://example.org/a)", "README.md") == "[far](https://example.org/a)"
    assert rewritten("```\n[JSON](docs/json.md)\n```\n", "README.md") == "```\n[JSON](docs/json.md)\n```\n"


def test_the_tests_have_one_command() -> None:
    """What README and CONTRIBUTING name is what CI runs."""
    for file in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        assert "make test" in (ROOT / file).read_text(), file


def test_packages_of_the_analyzer_stand_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.stem for path in (ROOT / "analyzer").iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert not {name for name in packages - {"__init__"} if f"`{name}`" not in text}
