"""`--info-search` and its related questions on the command line."""

from __future__ import annotations

import csv
import json
import re
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from analyzer import search
from analyzer.errors import InputError
from tests.command import Outcome, assert_refused, report, run
from tests.job_of import BASE
from tests.report.printed import section, titles

ALONE = ("--nproc-per-node", "8", "pretrain_gpt.py", *BASE.split(), "--global-batch-size", "64", "--info-gpu", "H100-80GB")
LAUNCH = (*ALONE, "--info-workers", "1")
SEARCH = (*LAUNCH, "--info-search", "--info-search-over", "tp,pp,micro-batch,recompute")
SMALL = (*LAUNCH, "--info-search", "--info-search-over", "tp,pp,micro-batch")
"""A search of 40 layouts."""


class Search(NamedTuple):
    """A search on the console, with the files that it writes."""

    outcome: Outcome
    rows: list[dict[str, str]]
    """Of `--info-search-csv`."""
    document: dict[str, Any]
    """Of `--info-json`."""


@cache
def made(*words: str) -> Search:
    """A search that several tests read, made once."""
    with TemporaryDirectory() as name:
        rows, document = Path(name, "layouts.csv"), Path(name, "search.json")
        outcome = run(*words, "--info-search-csv", str(rows), "--info-json", str(document))
        return Search(outcome, list(csv.DictReader(rows.read_text().splitlines())), json.loads(document.read_text()))


def searched(*words: str) -> dict[str, Any]:
    """The JSON report of a search."""
    return made(*words).document


SEARCHES = [pytest.param(SMALL, id="small"), pytest.param(SEARCH, marks=pytest.mark.slow, id="recomputation")]
EACH = pytest.mark.parametrize("words", SEARCHES)


@EACH
def test_the_printed_commands_give_the_figures_of_the_search(words: tuple[str, ...]) -> None:
    """A command can be pasted: analyzed by itself, it has the memory and the time that the search has found."""
    found = searched(*words)["search"]
    assert len(found["commands"]) == 3
    for command, layout in zip(found["commands"], found["best"], strict=False):
        assert "--info" not in command
        program, *pasted = shlex.split(command)
        assert program == "torchrun"
        alone = report(*pasted, "--info-gpu", "H100-80GB")
        assert layout["device_bytes"] == max(rank["memory"]["device_bytes"] for rank in alone["ranks"])
        assert alone["time"]["iteration_seconds"] == pytest.approx(layout["iteration_seconds"], rel=1e-9)
        assert alone["time"]["parts_seconds"] == pytest.approx(layout["parts_seconds"], rel=1e-9)
        assert alone["verdict"]["fits"] is True


@EACH
def test_the_commands_on_the_console_can_be_pasted(words: tuple[str, ...]) -> None:
    """A shell reads the lines of each as one command, the same as in the JSON report."""
    outcome, _, document = made(*words)
    commands = outcome.out.partition("Commands of the first layouts")[2]
    pasted = [" ".join(shlex.split(text.partition("\n")[2].replace("\\\n", " "))) for text in commands.split("# layout ")[1:]]
    assert pasted == [" ".join(shlex.split(command)) for command in document["search"]["commands"]]
    assert "\\\n" in commands


@pytest.mark.slow
def test_a_release_without_an_option_has_no_layouts_with_it() -> None:
    """Context parallelism, uneven stages and --recompute-modules are later than the code of August 2023."""
    kept = "micro-batch-size,tensor-model-parallel-size"
    words = (*LAUNCH, "--info-megatron", "2023", "--info-search", "--info-keep", kept)
    found = report(*words, "--info-gpu-memory", "6GiB")["search"]
    assert len(found["commands"]) == 3
    for command, layout in zip(found["commands"], found["best"], strict=False):
        alone = report(*shlex.split(command)[1:], "--info-megatron", "2023", "--info-gpu", "H100-80GB")
        assert layout["device_bytes"] == max(rank["memory"]["device_bytes"] for rank in alone["ranks"])
    for layout in found["best"]:
        assert {"--context-parallel-size", "--decoder-last-pipeline-num-layers", "--recompute-modules"}.isdisjoint(
            layout["options"]
        )


def test_a_dimension_whose_option_the_release_lacks_is_refused() -> None:
    assert_refused(run(*ALONE, "--info-megatron", "2023", "--info-search", "--info-search-over", "cp"), "--info-search-over")


@EACH
def test_the_best_layouts_are_in_order_and_not_slower_than_the_launch(words: tuple[str, ...]) -> None:
    document = searched(*words)
    found = document["search"]
    times = [each["iteration_seconds"] for each in found["best"]]
    assert times == sorted(times)
    assert times[0] <= document["time"]["iteration_seconds"] == found["given"]["iteration_seconds"]
    assert found["complete"] is True
    assert found["evaluated"] >= len(times)
    front = [(each["iteration_seconds"], each["device_bytes"]) for each in found["front"]]
    assert front == sorted(front)
    assert [size for _, size in front] == sorted((size for _, size in front), reverse=True)


@EACH
def test_the_console_lists_the_layouts_and_the_commands(words: tuple[str, ...]) -> None:
    outcome, written, document = made(*words)
    found = document["search"]
    assert (outcome.status, outcome.err) == (0, "")
    assert titles(outcome.out)[0] == "Search"
    assert titles(outcome.out)[-1] == "Commands of the first layouts"
    rows = [line for line in section(outcome.out, "Search") if line.strip()[:1].isdigit() and "GiB" in line]
    assert len(rows) == len(found["best"])
    assert sum(row["best"] == "True" for row in written) == len(found["best"])
    assert float(written[0]["iteration_seconds"]) == pytest.approx(found["best"][0]["iteration_seconds"])


@EACH
def test_kept_options_do_not_change(words: tuple[str, ...]) -> None:
    found = report(*words, "--info-keep", "tensor-model-parallel-size,--micro-batch-size")["search"]
    for layout in found["best"] + found["front"]:
        assert {"--tensor-model-parallel-size", "--micro-batch-size"}.isdisjoint(layout["options"])
    changed = {flag for layout in searched(*words)["search"]["best"] for flag in layout["options"]}
    assert changed & {"--tensor-model-parallel-size", "--micro-batch-size"}


def test_without_any_layout_that_fits_the_exit_status_is_1() -> None:
    outcome = run(*SMALL, "--info-gpu-memory", "1GiB")
    assert (outcome.status, outcome.err) == (1, "")
    assert "No layout fits." in outcome.out


@EACH
def test_a_launch_that_does_not_fit_gets_the_smallest_change(words: tuple[str, ...]) -> None:
    """With memory between that of the launch and that of a change of one dimension, one is enough."""
    launch = report(*ALONE)
    needed = max(rank["memory"]["device_bytes"] for rank in launch["ranks"])
    outcome, _, document = made(*words, "--info-gpu-memory", str(needed - 1))
    found = document["search"]
    assert found["given"] is None
    change = found["smallest_change"]
    assert change["device_bytes"] < needed
    assert change["options"]
    assert "does not fit. The smallest change that fits: --" in " ".join(outcome.out.split())


@pytest.mark.parametrize("option", ["micro-batch-size", "seq-length"])
def test_the_largest_value_fits_and_the_next_does_not(option: str, tmp_path: Path) -> None:
    file = tmp_path / "largest.json"
    assert run(*ALONE, "--info-search-max", option, "--info-json", str(file)).status == 0
    found = json.loads(file.read_text())["largest"]
    assert found["option"] == option
    for value, fits in ((found["value"], True), (found["next_value"], False)):
        if value is not None:
            positions = ("--max-position-embeddings", str(max(4096, value))) if option == "seq-length" else ()
            alone = report(*ALONE, f"--{option}", str(value), *positions)
            assert alone["verdict"]["fits"] is fits


def test_the_largest_value_over_all_layouts() -> None:
    words = (*LAUNCH, "--info-search", "--info-search-over", "tp,pp", "--info-search-max", "micro-batch-size")
    (found,) = report(*words)["extremes"]
    alone = report(*ALONE, "--info-search-max", "micro-batch-size")["largest"]
    assert (found["gpu"], found["what"]) == ("H100-80GB", "micro-batch-size")
    assert found["value"] >= alone["value"]
    printed = run(*words).out
    assert titles(printed) == ("Largest micro-batch (H100-80GB)",)
    options = shlex.split(printed.partition("Options:")[2].replace("\\\n", ""))
    assert options[options.index("--micro-batch-size") + 1] == str(found["value"])
    pasted = report(*ALONE, *options)
    assert max(rank["memory"]["device_bytes"] for rank in pasted["ranks"]) == found["layout"]["device_bytes"]


def test_the_smallest_number_of_gpus() -> None:
    words = (*LAUNCH, "--info-search-over", "tp,pp", "--info-search-fewest-gpus", "--info-tokens", "1T", "--info-price", "2")
    (found,) = report(*words)["extremes"]
    assert (found["what"], found["value"], found["gpus"]) == ("gpus", 1, 1)
    days = found["training"]["days"]
    (faster,) = report(*words, "--info-search-days", f"{0.6 * days:f}")["extremes"]
    assert faster["value"] > 1
    assert faster["training"]["days"] <= 0.6 * days
    printed = " ".join(run(*words, "--info-search-days", f"{0.6 * days:f}").out.split())
    assert "are the fewest with which the launch fits within" in printed


def test_the_options_of_each_number_of_gpus_can_be_pasted() -> None:
    words = (*LAUNCH, "--info-search", "--info-search-over", "tp", "--info-search-gpus", "4,8", "--tensor-model-parallel-size", "2")
    found = {each["gpus"]: each["best"][0] for each in report(*words)["searches"]}
    printed = run(*words).out.partition("Options of each row:")[2].replace("\\\n", "")
    rows = {int(gpus): shlex.split(options) for gpus, options in re.findall(r"# (\d+) H100-80GB\n(.*)", printed)}
    assert rows
    for gpus, options in rows.items():
        pasted = report(*ALONE, "--tensor-model-parallel-size", "2", *options, "--info-world-size", str(gpus))
        assert pasted["time"]["iteration_seconds"] == pytest.approx(found[gpus]["iteration_seconds"])


def test_the_length_of_an_encoder_has_its_own_name() -> None:
    words = (
        "--nproc-per-node 2 pretrain_t5.py --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 256 --num-attention-heads 4 "
        "--encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 2 --bf16 --lr 1e-4 "
        "--global-batch-size 4 --train-iters 10 --vocab-size 1000 --tokenizer-type NullTokenizer --info-gpu A100-40GB "
        "--info-gpu-memory 5GiB --info-search-max seq-length"
    ).split()
    assert titles(run(*words).out) == ("Largest --encoder-seq-length",)
    printed = run(*words, "--info-search", "--info-search-over", "tp", "--info-workers", "1").out
    assert "the longest sequence of the encoder" in " ".join(printed.split())
    assert "--encoder-seq-length" in printed.partition("Options:")[2]


def test_numbers_of_gpus_and_gpus_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "searches.json"
    words = (
        *SEARCH,
        "--info-search-over",
        "tp",
        "--info-search-gpus",
        "8,16",
        "--info-gpu",
        "H100-80GB,A100-80GB",
        "--info-tokens",
        "1T",
        "--info-price",
        "2",
        "--info-json",
        str(file),
    )
    outcome = run(*words)
    found = json.loads(file.read_text())["searches"]
    assert [(each["gpu"], each["gpus"]) for each in found] == [
        ("H100-80GB", 8), ("H100-80GB", 16), ("A100-80GB", 8), ("A100-80GB", 16),
    ]  # fmt: skip
    for each in found:
        training = each["training"]
        assert training["cost"] == pytest.approx(2 * training["gpu_hours"])
        assert training["tokens"] >= 1e12
    seconds = {(each["gpu"], each["gpus"]): each["best"][0]["iteration_seconds"] for each in found}
    assert seconds["H100-80GB", 16] < seconds["H100-80GB", 8] < seconds["A100-80GB", 8]  # 989 and 312 TFLOP/s
    assert titles(outcome.out) == ("Fastest layouts that fit",)


@EACH
def test_one_gpu_alone_equals_its_search_in_a_comparison(words: tuple[str, ...]) -> None:
    alone = searched(*words)["search"]["best"]
    compared = report(*words, "--info-search-gpus", "8")["searches"][0]["best"]
    assert compared == alone


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--info-search-over", "tp"), "--info-search-over"),
        (("--info-keep", "micro-batch-size"), "--info-keep"),
        (("--info-workers", "2"), "--info-workers"),
        (("--info-search", "--info-search-over", "tp,qq"), "--info-search-over"),
        (("--info-search", "--info-keep", "not-an-option"), "--info-keep"),
        (("--info-search-gpus", "12,x"), "--info-search-gpus"),
        (("--info-search-gpus", "12"), "--info-search-gpus"),
        (("--info-search-max", "layers"), "--info-search-max"),
        (("--info-search-max", "seq-length", "--info-search-gpus", "8,16"), "--info-search-max"),
        (("--info-search-csv", "file.csv", "--info-search-gpus", "8,16"), "--info-search-csv"),
        (("--info-search", "--info-search-days", "3"), "--info-search-days"),
        (("--info-search-fewest-gpus", "--info-search-max", "seq-length"), "--info-search-max"),
        (("--info-search-fewest-gpus", "--info-search-csv", "file.csv"), "--info-search-csv"),
        (("--info-html", "file.html", "--info-search-gpus", "8,16"), "--info-html"),
        (("--info-html", "file.html", "--info-search-max", "seq-length"), "--info-html"),
        (("--info-search", "--info-html", "/nonexistent/file.html"), "--info-html"),
        (("--info-search", "--info-engine", "shadow"), "--info-engine"),
        (("--info-search", "--info-against", "old.json"), "--info-against"),
        (("--info-search", "--info-efficiency", "flops=0.5"), "--info-search"),
        (("--info-gpu", "H100-80GB,A100-80GB"), "--info-gpu"),
        (("--info-gpu", "H100-80GB,", "--info-search"), "--info-gpu"),
        (("--info-search", "--info-search-over", ","), "--info-search-over"),
        (("--info-search", "--info-search-csv", "/nonexistent/file.csv"), "--info-search-csv"),
        (("--info-search", "--info-search-csv", "-"), "--info-search-csv"),
        (("--info-search", "--info-fail-on", "tight"), "--info-fail-on"),
        (("--info-search-max", "seq-length", "--info-keep", "hidden-size"), "--info-keep"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*ALONE, *words), option)


def test_a_search_that_its_limit_ends_says_what_is_proven() -> None:
    outcome = run(*SMALL, "--info-search-time", "0.000001")
    assert outcome.status == 0
    text = " ".join(outcome.out.split())
    assert "ended early (limit of 1e-06 s)" in text
    assert "a layout can be up to" in text


def test_a_search_without_a_terminal_prints_lines_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.cli.search.BETWEEN_LINES", 0.0)
    outcome = run(*SMALL)
    assert re.match(r"get-training-info: searching for \d+ s: \d+ layouts evaluated, ", outcome.err.splitlines()[-1])


def test_a_search_needs_a_gpu() -> None:
    assert_refused(run(*ALONE[:-2], "--info-search"), "--info-search")


@EACH
def test_the_python_api_gives_the_same_layouts(words: tuple[str, ...]) -> None:
    result = search(ALONE, over=words[-1].split(","))
    found = searched(*words)["search"]
    assert [each.options for each in result.best] == [each["options"] for each in found["best"]]
    assert {each.layout for each in result} == {each.layout for each in (*result.best, *result.front)}
    with pytest.raises(InputError, match="--info-search-over"):
        search(ALONE, over=("nothing",))
