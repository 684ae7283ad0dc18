"""Pages of the documentation site that are made when it is built: a hook of mkdocs, named in mkdocs.yml.

Files of the repository outside docs/ become pages, and the page of the commands is generated from the tables that the program
reads. Links are written as they work in the repository. On the site a link to a file that is a page leads to that page, and a link
to any other file of the repository becomes plain text. Comments about how commands are tested (`tools/doc_commands.py`) are left
out.
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
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "allocator_hook/FORMAT.md": "trace-format.md",
}
"""Files of the repository, and the pages they become."""
README: Final = "README.md"
"""The site has the page docs/index.md in its place."""
COMMANDS: Final = "commands.md"
EXPLORER: Final = ROOT / "tools" / "build_explorer.py"
"""The program that builds the explorer, which the site has if this file exists."""
_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_COMMENT: Final = re.compile(r"^<!-- (?:not run|run with|exit|needs): .* -->\n+", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages."""
    from mkdocs.structure.files import File  # the extra 'docs', which tests of the links do without

    for source, page in GENERATED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites the links of a page, and lets the search of the site put pages that answer questions first."""
    if page.file.src_uri.startswith("howto/"):
        page.meta["search"] = {"boost": 8}
    source = next((source for source, name in GENERATED.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    lines = markdown.splitlines(keepends=True)
    shown = "".join(line for line in lines if EXPLORER.exists() or 'href="explore/"' not in line)
    return rewritten(_COMMENT.sub("", shown), source)


def rewritten(markdown: str, source: str) -> str:
    """`markdown` of the repository's file `source` with links that work on the site. Fenced code stays as it is."""
    parts = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(lambda link: _link(link, source), part) for part in parts)


def _link(link: re.Match[str], source: str) -> str:
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    page = page_of(os.path.normpath(PurePosixPath(source).parent / target))
    if page is not None:
        folder = PurePosixPath(page_of(source) or "index.md").parent
        return f"[{link['text']}]({os.path.relpath(page, folder)}{link['anchor'] or ''})"
    return link["text"] if (ROOT / os.path.normpath(PurePosixPath(source).parent / target)).exists() else link[0]


def page_of(path: str) -> str | None:
    """The page that a file of the repository is on the site; None if it is none."""
    if path == README:
        return "index.md"
    return GENERATED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def commands() -> str:
    """The page of the commands: each with its question, an example and its options."""
    from analyzer.cli.commands.table import COMMANDS as TABLE
    from analyzer.cli.commands.table import COMMON, GENERATION, fields_of, flag_of_field
    from analyzer.launch.info_options import OPTIONS

    def table(fields: tuple[str, ...]) -> list[str]:
        rows = [(flag_of_field(field), OPTIONS[field].value, OPTIONS[field].help) for field in fields]
        lines = [f"| `{' '.join(filter(None, (flag, _cell(value))))}` | {_cell(help_)} |" for flag, value, help_ in rows]
        return ["| option | meaning |", "| --- | --- |", *lines, ""]

    found = [
        "# Commands",
        "",
        "`get-training-info COMMAND TARGET [options]`. TARGET is a launch script with its arguments, the Hugging Face name,",
        "`config.json` or folder of a model with options of Megatron-LM, a configuration file of a framework, or a launch command.",
        "Options stand before or after the target, and before a launch command; what follows `--` belongs to the script.",
        '`get-training-info COMMAND --help` lists them, and `eval "$(get-training-info completion bash)"` completes them',
        "(`pip install '.[completion]'`). This page is generated from the tables of the program.",
        "",
    ]
    for name, command in TABLE.items():
        found += [f"## {name}", "", command.help, "", "```", f"get-training-info {name} {command.example}".rstrip(), "```", ""]
        if name == "serve":
            found += [f"Options: {', '.join(f'`--{each}`' for each in GENERATION)} (what is generated), and those below.", ""]
        own = tuple(field for field in fields_of(name) if field not in COMMON)
        found += table(own) if own else []
    return "\n".join([*found, "## Options of every command that analyzes a launch", "", *table(COMMON)])


def _cell(text: str) -> str:
    """A text as the cell of a table."""
    return text.replace("|", "\\|")
