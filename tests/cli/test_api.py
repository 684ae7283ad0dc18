"""The Python API, and that a call does not change the state of the process."""

from __future__ import annotations

import gc
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import analyzer
from analyzer.errors import InputError
from tests.command import report, run
from tests.job_of import BASE

LAUNCH = f"--nproc-per-node 8 pretrain_gpt.py {BASE} --global-batch-size 64 --use-distributed-optimizer"
DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_api_and_the_command_line_give_the_same_report() -> None:
    found = analyzer.analyze(LAUNCH, gpu="H100-80GB")
    printed = report(*LAUNCH.split(), "--info-gpu", "H100-80GB")
    assert found.verdict.fits is printed["verdict"]["fits"] is True
    assert [each.memory.device_bytes for each in found.ranks] == [each["memory"]["device_bytes"] for each in printed["ranks"]]
    assert analyzer.analyze(LAUNCH.split(), gpu="H100-80GB") == found


def test_the_number_of_parameters_of_gpt(tmp_path: Path) -> None:
    """12·L·h² + 13·L·h for the layers, (V + s)·h for the embeddings and 2·h for the final norm (Narayanan et al. 2021)."""
    layers, hidden, sequence, vocabulary = 8, 1024, 2048, 32128  # 32,000 and the end-of-document token, padded
    found = analyzer.analyze(LAUNCH, folder=tmp_path, environ={})
    expected = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden + 2 * hidden
    assert found.ranks[0].parameters == expected


def test_a_quotation_that_does_not_end() -> None:
    for call in (analyzer.analyze, analyzer.analyze_inference, analyzer.analyze_offload, analyzer.search):
        with pytest.raises(InputError, match="argv"):
            call(f"{LAUNCH} --save 'folder")


def test_numbers_and_paths_in_a_list_are_words(tmp_path: Path) -> None:
    """A number is written as on the command line."""
    words: list[str | float | Path] = [*LAUNCH.split(), "--num-layers", 4, "--lr", 1e-4, "--load", tmp_path]
    expected = analyzer.analyze(f"{LAUNCH} --num-layers 4 --lr 0.0001 --load {tmp_path}")
    assert analyzer.analyze(words) == expected
    assert expected.job.model.num_layers == 4


@pytest.mark.parametrize("item", [None, True, b"--bf16", ["--bf16"], 1j, {"--bf16": 1}])
def test_an_item_that_is_no_word_is_named(item: object) -> None:
    for call in (analyzer.analyze, analyzer.analyze_inference, analyzer.analyze_offload, analyzer.search):
        with pytest.raises(InputError, match=r"^argv: has the item .* of type \w+; give texts, numbers and paths") as caught:
            call([*LAUNCH.split(), item])  # type: ignore[list-item]
        assert repr(item) in str(caught.value)


@pytest.mark.parametrize("argv", [None, 5, b"--bf16", {"--num-layers": 4}, Path("train.sh")])
def test_words_are_a_string_or_a_list(argv: object) -> None:
    with pytest.raises(InputError, match=r"^argv: is of type \w+; give a string or a list of words$"):
        analyzer.analyze(argv)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [f"{LAUNCH} --help", f"--help {LAUNCH}", f"{LAUNCH} -h", "--version"])
def test_help_and_version_are_refused(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    for call in (analyzer.analyze, analyzer.analyze_inference, analyzer.analyze_offload, analyzer.search):
        with pytest.raises(InputError, match=r"^(--help|-h|--version): belongs to the command line; leave it out"):
            call(line)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "option", ["--info-json -", "--info-record x", "--info-engine shadow", "--info-launch", "--info-detail full"]
)
def test_options_of_the_command_line_are_rejected(option: str) -> None:
    with pytest.raises(InputError, match=option.split()[0]):
        analyzer.analyze(f"{LAUNCH} {option}")


@pytest.mark.parametrize("line", [f"{LAUNCH} --info-gpu H100-80GB", f"{LAUNCH} --info-json -", "--num-layers x", "--help"])
def test_main_does_not_change_the_process(line: str) -> None:
    gc.collect()
    gc.freeze()  # so that the count is not 0
    before, frozen = (gc.isenabled(), dict(os.environ), Path.cwd()), gc.get_freeze_count()
    run(*line.split())
    assert (gc.isenabled(), dict(os.environ), Path.cwd()) == before
    assert frozen / 2 < gc.get_freeze_count() <= frozen  # it falls when a frozen object of a cache is freed


@pytest.mark.parametrize("number", range(5))
def test_the_examples_of_the_documentation_run(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of docs/api.md are programs, each followed by its output."""
    blocks = (DOCS / "api.md").read_text().split("```")[1::2]
    assert len(blocks) == 10
    if number == 2:
        pytest.importorskip("pandas")
    program, output = blocks[2 * number].removeprefix("python\n"), blocks[2 * number + 1].removeprefix("text\n")
    monkeypatch.chdir(DOCS.parent)
    exec(compile(program, "docs/api.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_the_text_of_a_report_is_one_line() -> None:
    """A notebook prints it for the last value of a cell."""
    text = repr(analyzer.analyze(LAUNCH, gpu="H100-80GB"))
    assert re.fullmatch(r"<Report: fits on H100-80GB, [\d.]+ GiB of the highest-memory rank, [\d.]+ m?s for an iteration>", text)


def test_a_report_as_a_dictionary_is_the_json_report() -> None:
    generation = "--info-model meta-llama/Llama-3.1-8B --info-world-size 1 --info-inference batch=2,prompt=1k,generate=16"
    for line, call in ((LAUNCH, analyzer.analyze), (generation, analyzer.analyze_inference)):
        printed = report(*line.split(), "--info-gpu", "H100-80GB")
        made = json.loads(json.dumps(call(line, gpu="H100-80GB").to_dict()))
        assert made.pop("command") == [*line.split(), "--info-gpu", "H100-80GB"]
        of_command_line = {"newest_release": None} if call is analyzer.analyze else {}
        assert made == {name: value for name, value in printed.items() if name != "command"} | of_command_line


def test_the_frame_has_every_rank_once() -> None:
    pytest.importorskip("pandas")
    found = analyzer.analyze(f"{LAUNCH} --pipeline-model-parallel-size 2", gpu="H100-80GB")
    frame = found.to_pandas()
    assert frame["number_of_ranks"].sum() == 8
    assert frame["device_bytes"].max() == max(each.memory.device_bytes for each in found.ranks)


class Tags(HTMLParser):
    """The names of all tags and attributes of a text, and the words between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_a_notebook_shows_a_small_table() -> None:
    """Without attributes and scripts. A name is a text."""
    training = analyzer.analyze(LAUNCH, gpu="H100-80GB")
    generation = "--info-model meta-llama/Llama-3.1-8B --info-world-size 1"
    found = (
        training,
        analyzer.search(LAUNCH, gpu="H100-80GB", over=("tp",)),
        analyzer.analyze_inference(generation, batch=2, prompt=128, generate=16, gpu="H100-80GB"),
    )
    for each in found:
        text = each._repr_html_()
        assert len(text) < 3000
        assert Tags(text).names <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "It fits" in Tags(training._repr_html_()).words
    named = replace(training, verdict=replace(training.verdict, gpu="<script>alert(1)</script>"))
    assert "script" not in Tags(named._repr_html_()).names
    assert "<script>" in Tags(named._repr_html_()).words


def test_a_search_as_a_dictionary_is_a_field_of_the_json_report() -> None:
    found = analyzer.search(LAUNCH, gpu="H100-80GB", over=("tp",)).to_dict()
    printed = report(*LAUNCH.split(), "--info-gpu", "H100-80GB", "--info-search", "--info-search-over", "tp", "--info-workers", "1")
    assert json.loads(json.dumps(found))["best"] == printed["search"]["best"]


def _script(folder: Path, *lines: str) -> Path:
    script = folder / "train.sh"
    script.write_text("\n".join(("#!/bin/bash", *lines)) + "\n")
    return script


def test_a_launch_script_with_arguments(tmp_path: Path) -> None:
    """The report is that of the launch, with the options of the call."""
    _script(tmp_path, f"torchrun {LAUNCH} --micro-batch-size $1")
    found = analyzer.analyze("train.sh 2 --info-gpu H100-80GB", folder=tmp_path)
    expected = analyzer.analyze(f"{LAUNCH} --micro-batch-size 2", gpu="H100-80GB", folder=tmp_path)
    assert found.job.batch.micro_batch_size == 2
    assert found.ranks == expected.ranks
    assert found.verdict == expected.verdict


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((f"torchrun {LAUNCH}", f"torchrun {LAUNCH} --bf16"), r"starts 2 launches \(lines 2, 3\); .*--info-dry"),
        (("echo nothing",), "ended without starting a training"),
    ],
)
def test_a_script_that_does_not_start_one_launch(lines: tuple[str, ...], message: str, tmp_path: Path) -> None:
    _script(tmp_path, *lines)
    with pytest.raises(InputError, match=f"^train.sh: {message}"):
        analyzer.analyze("train.sh", folder=tmp_path)


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^missing\.sh: is not a file; give the path"):
        analyzer.analyze("missing.sh", folder=tmp_path)
