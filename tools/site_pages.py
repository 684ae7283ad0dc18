"""Pages of the documentation site that are files of the repository outside docs/: a hook of mkdocs, named in mkdocs.yml.

Links are written as they work in the repository. On the site a link to a file that is a page leads to that page, and a link to any
other file of the repository becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).resolve().parent.parent
GENERATED: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "allocator_hook/FORMAT.md": "trace-format.md",
}
"""Files of the repository, and the pages they become."""
_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages."""
    from mkdocs.structure.files import File  # the extra 'docs', which tests of the links do without

    for source, page in GENERATED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    source = next((source for source, name in GENERATED.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    return rewritten(markdown, source)


def rewritten(markdown: str, source: str) -> str:
    """`markdown` of the repository's file `source` with links that work on the site. Fenced code stays as it is."""
    parts = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(lambda link: _link(link, source), part) for part in parts)


def _link(link: re.Match[str], source: str) -> str:
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = os.path.normpath(PurePosixPath(source).parent / target)
    page = GENERATED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is not None:
        return f"[{link['text']}]({page}{link['anchor'] or ''})"
    return link["text"] if (ROOT / path).exists() else link[0]
