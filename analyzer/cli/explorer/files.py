"""The files of the page: names in its folder, and where they are in the package."""

from __future__ import annotations

from importlib import resources
from typing import Final

PAGE: Final = "analyzer.cli.explorer.page"
LIBRARY: Final = "analyzer.report.html.assets"
OF_LIBRARY: Final = ("echarts.min.js", "echarts.LICENSE", "echarts.NOTICE")
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
"""Types by the ending of a name. Others are text."""
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of the page. The charts have styles in attributes."""


def names() -> list[str]:
    """The names of all files."""
    own = (each.name for each in resources.files(PAGE).iterdir() if not each.name.startswith("__"))
    return sorted((*own, *OF_LIBRARY))


def content(name: str) -> bytes | None:
    """The content of a file by its name; None for other names."""
    if name not in names():
        return None
    return resources.files(LIBRARY if name in OF_LIBRARY else PAGE).joinpath(name).read_bytes()


def type_of(name: str) -> str:
    """The media type of a file."""
    return TYPES.get(name[name.rfind(".") :], "text/plain; charset=utf-8")
