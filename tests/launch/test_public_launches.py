"""Launches of public scripts of Megatron-LM and its forks, compared with values worked out by hand from script and source.

`tests/data/README.md` describes the records. No expected value is output of this program.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from analyzer.api import analyze
from analyzer.launch.argv_parser import is_option
from analyzer.launch.forks.fork_table import load_fork_options
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv
from analyzer.report.json.document import to_json
from analyzer.results import Report
from tests.data_files import public_launches

RECORDS = public_launches()
NAMES = [f"{record['repository']}/{record['path']}" for record in RECORDS]
LARGE = ("sbatch_mfsdp_deepseek_v3.sh", "moe_356m_8gpu.sh")
"""Scripts whose reports take the longest."""
EVERY = pytest.mark.parametrize(
    "index",
    [
        pytest.param(at, id=f"{at}-{name}", marks=[pytest.mark.slow] if name.endswith(LARGE) else [])
        for at, name in enumerate(NAMES)
    ],
)


@cache
def report(index: int) -> Report:
    """The report of a record, without files of the launch."""
    record = RECORDS[index]
    return analyze(record["argv"], environ=record["env"], folder="/nowhere")


@cache
def document(index: int) -> dict[str, Any]:
    """The fields `world`, `model` and `warnings` of the JSON report."""
    found = to_json(report(index))
    return {name: found[name] for name in ("world", "model", "warnings")}


def warnings(index: int) -> list[str]:
    said: list[str] = document(index)["warnings"]
    return said


def value(term: str, sizes: dict[str, int]) -> int:
    """The value of an arithmetic term, such as 'L*(12*h*h + 13*h)'."""
    number = eval(term, {"__builtins__": {}}, dict(sizes))
    assert isinstance(number, int)
    return number


def test_many_launches_of_many_forks() -> None:
    assert len(RECORDS) >= 20
    assert len({record["fork"] for record in RECORDS}) >= 8


@EVERY
def test_parameters(index: int) -> None:
    hand = RECORDS[index]["parameters"]
    assert sum(value(term, hand["sizes"]) for term in hand["terms"].values()) == hand["total"]
    uncounted = {flag: value(term, hand["sizes"]) for flag, term in hand["differences"].items()}
    for flag in uncounted:
        assert any(said.startswith(f"{flag}: ") for said in (*warnings(index), *report(index).assumptions)), flag
    assert report(index).parameters == hand["total"] - sum(uncounted.values())


@EVERY
def test_vocabulary(index: int) -> None:
    expected = RECORDS[index]["vocabulary"]
    model = document(index)["model"]
    assert model["padded_vocab_size"] == expected["padded"] == RECORDS[index]["parameters"]["sizes"]["V"]
    said = [sentence for sentence in warnings(index) if sentence.startswith("The vocabulary size is not known")]
    assert bool(said) == expected["assumed"]
    assert not said or f"{expected['tokens']:,} tokens are assumed" in said[0]


@EVERY
def test_world_and_groups(index: int) -> None:
    expected = RECORDS[index]["world"]
    assert document(index)["world"] == {key: expected[key] for key in ("size", "nodes", "gpus_per_node")}
    for kind, (number, size) in RECORDS[index]["groups"].items():
        assert number * size == expected["size"]
        assert report(index).group_counts[kind] == number, kind
        assert {len(group) for group in report(index).groups[kind]} == {size}, kind


@EVERY
def test_options_that_are_not_counted_are_named(index: int) -> None:
    named = {said.partition(" ")[0].rstrip(":") for said in report(index).unknown if said.startswith("--")}
    assert named == set(RECORDS[index]["not_counted"])
    assert all(said in warnings(index) for said in report(index).unknown)


@EVERY
def test_every_option_is_known_or_named(index: int) -> None:
    """Each option is Megatron-LM's, an option of a fork that is modelled or has no effect, or named in the warnings."""
    catalogue, forks = load_catalogue(), load_fork_options()
    words = split_argv(RECORDS[index]["argv"], catalogue.newest).megatron
    named = [said.partition(" ")[0].rstrip(":") for said in warnings(index)]
    for position, word in enumerate(words):
        flag, _, attached = word.partition("=")
        if not is_option(word):
            continue
        following = attached or next(iter(words[position + 1 : position + 2]), "")
        row = forks.find(flag, catalogue.newest)
        special = forks.find_value(flag, following)
        known = flag in catalogue.masks or (row is not None and row.effect in ("modelled", "none"))
        if not known or (special is not None and special.effect == "not counted"):
            assert flag in named, flag
