"""Control characters from files, options and scripts do not reach the terminal or the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from analyzer.report.html.page import _as_json as json_of_page
from analyzer.report.visible import visible, visible_json
from analyzer.script.stand_ins import context
from tests.command import run
from tests.job_of import BASE
from tests.report.html.pages import embedded

HOSTILE = "\x1b[31mred\x07 \x9b2J\x7f \u202edesrever\u202c \u2066x\u2069 \u2028line\nIt fits: everything"
"""Escapes of terminals (also as C1), deletion, other directions of text, and two ways to begin a line."""
LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64", "--info-gpu", "H100-80GB")


def controls(text: str) -> set[str]:
    """The control, format and separating characters of a text, except line feeds."""
    return {each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}


def test_every_control_character_is_escaped() -> None:
    dangerous = [*map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029))]
    for each in dangerous:
        assert visible(f"a{each}b").isprintable()
        assert json.loads(visible_json(json.dumps(each, ensure_ascii=False))) == each
    assert visible("\x1b\n") == "\\x1b\\n"
    assert visible("a\n\tb\r", lines=True) == "a\n\tb\\r"
    ordinary = "It fits: 61.08 GiB · 4–7 × ─ é 模型 🙂"
    assert visible(ordinary) == ordinary
    for each in {*dangerous, "\u061c", "\u200e", "\u200f"} - {"\n", "\t"}:
        assert json.loads(json_of_page([each])) == [visible(each)]
    assert json.loads(json_of_page([ordinary, "\n\t"])) == [ordinary, "\n\t"]


def hostile_runs(folder: Path) -> list[tuple[str, ...]]:
    """Launches with names that have control characters: an older report, a model, options, files and a GPU."""
    old, config = folder / f"{HOSTILE.replace('/', '')}.json", folder / "config.json"
    document = json.loads(run(*LAUNCH, "--info-json", "-").out)
    for rank in document["ranks"]:
        for part in rank["memory"]["runtime_parts"]:
            part["name"] += HOSTILE
            part["bytes"] += 2**30
    document["verdict"]["gpu"] = document["software"]["torch"] = document["megatron"] = HOSTILE
    old.write_text(json.dumps(document))
    fields = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000,
        "intermediate_size": 1024, "rope_scaling": {"type": HOSTILE, "factor": 2},
    }  # fmt: skip
    config.write_text(json.dumps(fields))
    model = ("--info-model", str(config), "--nproc-per-node", "8", "--info-gpu", "H100-80GB")
    return [
        (*LAUNCH, "--info-against", str(old)),
        model,
        (*model, "--info-json", "-"),
        (*model, "--info-print-options"),
        (*LAUNCH, f"--foo{HOSTILE}", f"--bar{HOSTILE}", HOSTILE),
        (*LAUNCH, f"--foo{HOSTILE}"),
        (*LAUNCH, f"--foo{HOSTILE}", "--info-json", "-"),
        (*LAUNCH, f"--foo{HOSTILE}", "--info-strict"),
        (*LAUNCH, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", HOSTILE),
        (*LAUNCH, "--info-gpu", HOSTILE),
        (*LAUNCH, "--info-model", HOSTILE),
        (*LAUNCH, "--info-json", str(folder / HOSTILE / "report.json")),
        (*LAUNCH, "--info-search", "--info-search-over", "tp", "--save", HOSTILE),
    ]


def test_no_control_character_is_printed(tmp_path: Path) -> None:
    for words in hostile_runs(tmp_path):
        outcome = run(*words)
        assert outcome.status in (0, 1, 2), outcome.err
        assert controls(outcome.out + outcome.err) == set(), words
        assert not any(line.startswith("It fits: everything") for line in (outcome.out + outcome.err).splitlines()), words


def test_the_page_shows_escapes(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    file = tmp_path / "report.html"
    outcome = run(*LAUNCH, f"--foo{HOSTILE}".replace(" ", ""), "--info-html", str(file))
    assert outcome.status == 0, outcome.err
    page = file.read_text(encoding="utf-8")
    assert controls(page) == set()
    data = embedded(page, "reports")
    assert "--foo\\\\x1b[31mred" in data
    assert controls(json.dumps(json.loads(data), ensure_ascii=False)) == set()


@pytest.mark.slow
def test_colours_reach_a_terminal(tmp_path: Path) -> None:
    """Only the escapes of rich are left, which begin with ESC [ and end with m."""
    leader, follower = os.openpty()
    program = (sys.executable, str(Path(__file__).parents[2] / "get_training_info.py"), *LAUNCH, "--foo\x1b[2J")
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": ""}
    process = subprocess.Popen(program, stdout=follower, stderr=subprocess.DEVNULL, cwd=tmp_path, env=environment)
    os.close(follower)
    shown = b""
    try:
        while block := os.read(leader, 65536):
            shown += block
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    assert b"\x1b[1;32m" in shown
    assert b"\x1b[2J" not in shown
    assert b"--foo\\x1b[2J" in shown


def test_a_command_that_is_not_run_is_said_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    context.not_run(["rm", HOSTILE, os.fsdecode(b"\xff")])
    said = capfd.readouterr().err
    assert said.startswith("get-training-info: not run: rm '\\x1b[31mred")
    assert said.count("\n") == 1
    assert controls(said) == set()
