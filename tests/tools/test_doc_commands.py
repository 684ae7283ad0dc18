"""Every command of the documentation is run, and what the pages show of its output is what it prints."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from analyzer.cli.commands.table import COMMANDS, fields_of, flag_of_field
from analyzer.launch.info_options import FLAGS
from tools.doc_commands import FILES, REASONS, ROOT, blocks, faults, missing_lines, pages

HAS_SHADOW = all(find_spec(package) for package in ("torch", "megatron", "transformer_engine"))
WITH_COMMANDS = [file for file in pages() if any(not block.not_run for block in blocks(file))]


@pytest.mark.slow
@pytest.mark.parametrize("file", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_run(file: Path) -> None:
    assert [*faults(file, installed=("shadow",) if HAS_SHADOW else ())] == []


def test_the_programs_of_the_notebook_page_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "howto" / "notebook.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    for program, shown in found:
        exec(compile(program, "docs/howto/notebook.md", "exec"), {})
        assert capsys.readouterr().out == shown


def test_the_commands_that_are_not_run_are_few() -> None:
    """Each has one of the reasons, and most pages for readers have none of them."""
    of_all = [block for file in pages() for block in blocks(file)]
    left_out = [block for block in of_all if block.not_run]
    assert len(of_all) > 60
    assert len(left_out) < len(of_all) / 3
    assert {block.not_run for block in left_out} <= {*REASONS}


@pytest.mark.parametrize("file", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_of_commands_are_known(file: Path) -> None:
    """Also of those that are not run: bash reads them, and their options are options of the program."""
    for block in blocks(file):
        if block.not_run != REASONS[0]:
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
        assert {*re.findall(r"--info-[a-z-]+", block.text)} <= {*FLAGS}, block.place
        for name, rest in re.findall(r"get-training-info (\w+) ((?:[^\n]|\\\n)*)", block.text):
            if name in COMMANDS:
                own = {flag_of_field(field) for field in fields_of(name)}
                words = {*re.findall(r"(?<= )--(?:gpu|over|tokens|price|days|detail|html|margin|log|set|unset|network)\b", rest)}
                assert words <= own, block.place


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<!-- not run: it fails -->\n\n```bash\nfalse\n```\n", "the reason"),
        ("<!-- skip -->\n\n```bash\nfalse\n```\n", "not known"),
    ],
)
def test_unknown_comments_are_errors(text: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(ValueError, match=fault):
        blocks(file)


def test_a_command_that_fails_and_one_that_prints_something_else_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.doc_commands.ROOT", tmp_path)
    monkeypatch.setattr("tools.doc_commands.FILES", {})
    (tmp_path / "examples").mkdir()
    file = tmp_path / "page.md"
    printing = "```bash\necho a; echo b; echo c\n```\n\n```text\na\n…\nd\n```\n"
    file.write_text(f"```bash\nfalse\n```\n\n<!-- exit: 3 -->\n\n```bash\nexit 3\n```\n\n{printing}")
    first, second = faults(file)
    assert first.startswith("page.md:1: exit status 1")
    assert second == "page.md:11: not printed: 'd\\n'"


def test_shown_lines_are_found_in_their_order() -> None:
    assert missing_lines("a\n…\nc\n", "a\nb\nc\n") == ""
    assert missing_lines("c\n…\na\n", "a\nb\nc\n") == "a\n"
    assert missing_lines("5 layouts in 3.10 s: 4\n", "5 layouts in 6.24 s: 4\n") == ""


def test_the_files_that_commands_name_exist() -> None:
    assert all((ROOT / source).is_file() for source in FILES.values())
