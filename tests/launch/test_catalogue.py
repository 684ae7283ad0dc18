"""The catalogue, compared with the parsers of the releases, and the choice of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.argv_parser import read_words
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.option_table import frozen
from tests.data_files import data_file, parser_options
from tools import make_catalogue

RELEASES = ("0.12.3", "0.13.0", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0")
SAMPLES = {"int": ("7", 7), "float": ("0.5", 0.5), "str": ("x", "x"), None: ("x", "x"), "bool": ("x", True),
           "moe_freq_type": ("[0]+[1]", (0, 1)), "la_freq_type": ("[0]+[1]", (0, 1)), "no_rope_freq_type": ("2", 2),
           "tuple_type": ("1,2", (1, 2)), "<lambda>": ("x", "x"), "_parse_cuda_graph_modules_arg": ("x", "x")}  # fmt: skip


def read(*argv: str) -> Arguments:
    from analyzer.launch.parse import parse

    return parse(argv, environ={}, folder=Path("/nowhere"))[0]


def sample(option: dict[str, Any]) -> tuple[str, object]:
    """A valid word for the option, and its value."""
    if option["dest"] == "exit_signal":
        return "SIGTERM", 15
    if option["choices"]:
        choice = next(choice for choice in reversed(option["choices"]) if choice is not None)
        return str(choice), choice
    return SAMPLES[option["type"]]


@pytest.mark.parametrize("release", RELEASES)
def test_the_catalogue_has_every_option_of_a_release(release: str) -> None:
    options = parser_options(release)
    table = load_catalogue().table(release)
    assert set(table.options) == {flag for option in options for flag in option["flags"]}
    defaults: dict[str, object] = {}
    for option in options:
        defaults.setdefault(option["dest"], frozen(option["default"]))
        for flag in option["flags"]:
            word, value = sample(option)
            if option["kind"] == "StoreAction":
                count = option["nargs"] if isinstance(option["nargs"], int) else 1
                words, value = [flag] + [word] * count, (value,) * count if option["nargs"] else value
            else:
                words = [flag]
                value = option["const"] if option["kind"] != "BooleanOptionalAction" else not flag.startswith("--no-")
            reading = read_words(words, table)
            assert reading.values == {option["dest"]: value}, flag
            assert reading.spelled == {option["dest"]: flag}
    assert dict(table.defaults) == defaults


def test_catalogue_is_what_the_tool_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data_file("options")
    root = Path(__file__).parents[2]
    monkeypatch.setattr(make_catalogue, "CATALOGUE", tmp_path / "catalogue.json")
    make_catalogue.main(folder)
    assert (tmp_path / "catalogue.json").read_text() == (root / "analyzer/launch/options/catalogue.json").read_text()


@pytest.mark.parametrize(
    ("argv", "release"),
    [
        ("--bf16", "0.16.1"),
        ("--moe-extended-tp", "0.16.1"),
        ("--use-custom-fsdp", "0.13.0"),
        ("--encoder-tensor-model-parallel-size 1", "0.13.0"),
        ("--step-batch-size-schedule 0:768", "0.18.2"),
        ("--tensor-parallel-num-weight-shards 2", "0.19.0"),
        ("--data-impl mmap", "2023"),
        ("--DDP-impl local", "2023"),
        ("--moe-token-dispatcher-type alltoall_seq", "0.12.3"),
        ("--rampup-batch-size 16 16 100", "0.16.1"),
    ],
)
def test_the_nearest_release_that_accepts_the_line_is_assumed(argv: str, release: str) -> None:
    arguments = read(*argv.split())
    assert arguments.release == release
    if release != "0.16.1":
        assert argv.split()[0] in arguments.assumptions[-1]


def test_options_that_no_single_release_has_are_accepted_together() -> None:
    arguments = read("--use-custom-fsdp", "--step-batch-size-schedule", "0:768", "--num-layers", "2")
    assert arguments.values["use_custom_fsdp"] is True
    assert arguments.values["step_batch_size_schedule"] == "0:768"
    assert "--use-custom-fsdp" in arguments.assumptions[-1]


def test_a_value_that_every_release_refuses_names_the_choices_of_the_nearest() -> None:
    with pytest.raises(InputError, match="allgather, alltoall or flex"):
        read("--moe-token-dispatcher-type", "pigeon")


def test_defaults_of_2023() -> None:
    values = read("--data-impl", "mmap").values
    assert (values["transformer_impl"], values["recompute_num_layers"], values["apply_query_key_layer_scaling"]) == (
        "local",
        1,
        True,
    )
    assert "attention_backend" not in values
