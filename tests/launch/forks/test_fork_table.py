"""The table of fork options: it is well-formed, and every option that is modelled has a reading that Megatron-LM accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzer.launch.argv_parser import is_option, read_words
from analyzer.launch.forks import fork_table
from analyzer.launch.forks.fork_table import ForkOption, load_fork_options
from analyzer.launch.forks.readings import READINGS
from analyzer.launch.forks.translate import translate
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import split_argv

TABLE = load_fork_options()
CATALOGUE = load_catalogue()
FILE = Path(fork_table.__file__).with_name("fork_options.json")

REPEATED = {"--checkpoint-activations"}
"""Options of the catalogue that the table has as well: Megatron-LM parses it only to refuse it."""
SHAPE = {
    "--num-layers": ["24"],
    "--hidden-size": ["2048"],
    "--num-attention-heads": ["16"],
    "--num-experts": ["8"],
    "--tensor-model-parallel-size": ["2"],
    "--pipeline-model-parallel-size": ["2"],
    "--context-parallel-size": ["2"],
    "--bf16": [],
}
SAMPLES = {
    "--attention-head-type": "multiquery",
    "--context-parallel-algo": "megatron_cp_algo",
    "--activations-checkpoint-method": "block",
    "--activations-checkpoint-granularity": "selective",
    "--checkpoint-granularity": "selective",
    "--checkpoint-method": "block",
    "--norm-dtype": "RMSNorm",
    "--num-layer-list": "12,12",
    "--patch-tokenizer-type": "LLama3Tokenizer",
    "--pp-partition-method": "type:transformer|embedding",
}
"""Values of options that do not take a number."""


def modelled() -> list[ForkOption]:
    """The options that are modelled."""
    return [option for option in TABLE.options.values() if option.effect == "modelled"]


def flags_of(words: tuple[str, ...]) -> Iterator[str]:
    """The flags among words."""
    return (word for word in words if is_option(word))


def test_rows_are_sorted_and_unique() -> None:
    """One row for each flag, sorted, on a line of its own."""
    rows = json.loads(FILE.read_text())["options"]
    flags = [row[0] for row in rows]
    assert flags == sorted(set(flags))
    assert len([line for line in FILE.read_text().splitlines() if line.startswith('["-')]) >= len(flags)


def test_rows_are_well_formed() -> None:
    """Flags, forks, numbers of values and effects are of the known kinds, and the note fits the effect."""
    for option in (*TABLE.options.values(), *TABLE.prefixes):
        assert re.fullmatch(r"--[A-Za-z0-9][\w-]*", option.flag), option
        assert option.forks, option
        assert set(option.forks) <= set(TABLE.forks), option
        assert option.nargs in (0, 1, 2, "?", "*", "+"), option
        assert option.effect in ("modelled", "none", "not counted", "withheld", "refused"), option
        assert bool(option.note) == (option.effect != "modelled"), option
        assert not option.note.endswith("."), option
        assert not option.words or option.effect == "modelled", option


def test_no_row_repeats_an_option_of_megatron() -> None:
    """Only options that Megatron-LM refuses are in both tables."""
    assert {flag for flag in TABLE.options if flag in CATALOGUE.masks} == REPEATED


def test_every_modelled_option_has_one_reading() -> None:
    """Either words or a function, and no function without a row."""
    for option in modelled():
        assert bool(option.words) != (option.flag in READINGS), option.flag
    assert {option.flag for option in modelled()} >= set(READINGS)


@pytest.mark.parametrize("option", modelled(), ids=lambda option: option.flag)
def test_reading_has_options_of_megatron(option: ForkOption) -> None:
    """The words of each reading are options of Megatron-LM with values that a release accepts."""
    sample = SAMPLES.get(option.flag, "4")
    values = [] if option.nargs == 0 else [sample]
    others = {**SHAPE, **({option.flag: values} if option.flag in CATALOGUE.masks else {})}
    given = {} if option.flag in CATALOGUE.masks else {option.flag: values, "--deepspeed": []}
    words = translate(given, others, world=8).words
    assert set(flags_of(words)) <= set(CATALOGUE.newest)
    read_words(split_argv(words, CATALOGUE.newest).megatron, CATALOGUE.union())


def test_every_fork_has_options_and_a_known_base() -> None:
    """Forks without an option could not be recognized; the base is 2023 or a minor release of core."""
    used = {key for option in TABLE.options.values() for key in option.forks}
    assert set(TABLE.forks) == used
    for fork in TABLE.forks.values():
        assert re.fullmatch(r"2023|0\.\d+", fork.base), fork.key
        assert fork.repository.count("/") == 1


def test_replaced_values_are_not_accepted_by_megatron() -> None:
    """A value that Megatron-LM accepts needs no replacement, and the replacement is accepted."""
    options = CATALOGUE.union().options
    for row in TABLE.values:
        choices = options[row.flag].choices
        assert row.value not in (choices or ()), row
        assert not row.replacement or choices is None or row.replacement in choices, row
        assert set(row.forks) <= set(TABLE.forks), row
        assert bool(row.note) == (row.effect in ("not counted", "withheld")), row


def test_find_by_prefix_and_underscores() -> None:
    """A flag is found by its row, by its spelling with underscores, and by the longest prefix."""
    known = CATALOGUE.newest
    assert TABLE.find("--topk", known) is TABLE.options["--topk"]
    spelled = TABLE.find("--tensor_model_parallel_size", known)
    assert spelled is not None
    assert (spelled.effect, spelled.nargs) == ("modelled", 1)
    engine = TABLE.find("--sglang-mem-fraction-static", known)
    assert engine is not None
    assert (engine.forks, engine.effect) == (("slime",), "none")
    assert TABLE.find("--no-such-option", known) is None
