"""The catalogue, compared with the parsers of the releases, and the choice of a release."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.argv_parser import read_words
from analyzer.launch.options.catalogue import Catalogue, load_catalogue
from analyzer.launch.options.choose_release import Choice, read_with_catalogue
from analyzer.launch.options.option_table import Option, frozen
from tests.data_files import data_file, parser_options
from tools import make_catalogue, option_rows
from tools.options_before_0_12 import Difference, apply_difference

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


def test_the_catalogue_has_a_sorted_line_for_each_interval_of_releases() -> None:
    own, other, short = (option_rows.flag(name) for name in ("--own", "--other", "--short"))
    releases = {"2023": [own, other], "0.3.0": [own], "0.12.3": [own, other, short], "0.13.0": [own, other]}
    fields = {name: [name, "true", 0, True, False] for name in ("own", "other", "short")}
    assert make_catalogue.rows(releases) == [
        [["--other"], "-2023", *fields["other"]],
        [["--other"], "0.12-", *fields["other"]],
        [["--own"], "-", *fields["own"]],
        [["--short"], "0.12-0.12", *fields["short"]],
    ]
    # the next release changes no line but those of its own options
    later = make_catalogue.rows({**releases, "0.14.0": [own, other, option_rows.flag("--new")]})
    assert [row for row in later if row not in make_catalogue.rows(releases)] == [
        [["--new"], "0.14-", "new", "true", 0, True, False]
    ]


@pytest.mark.parametrize(
    ("argv", "release"),
    [
        ("--bf16", "0.16.1"),
        ("--moe-extended-tp", "0.16.1"),
        ("--use-custom-fsdp", "0.13.0"),
        ("--encoder-tensor-model-parallel-size 1", "0.13.0"),
        ("--step-batch-size-schedule 0:768", "0.18.2"),
        ("--tensor-parallel-num-weight-shards 2", "0.19.0"),
        ("--no-query-key-layer-scaling", "0.3.0"),
        ("--layernorm-epsilon 1e-6", "2023"),
        ("--retro-return-doc-ids", "0.5.0"),
        ("--moe-token-dropping", "0.6.0"),
        ("--enable-one-logger", "0.7.0"),
        ("--no-delay-grad-reduce", "0.8.0"),
        ("--renormalize-blend-weights", "0.10.0"),
        ("--moe-router-topk-limited-devices 2", "0.11.0"),
        ("--tokenizer-type Llama3Tokenizer", "0.8.0"),
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


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--delay-param-gather", "0.9 to 0.19 have no --delay-param-gather"),
        ("--use-custom-fsdp", "0.14 to 0.19 have no --use-custom-fsdp"),
        # 0.7 is the newest release with both
        ("--delay-param-gather --enable-one-logger --bf16", "0.8 to 0.19 have no --enable-one-logger"),
        ("--log-batch-size-to-tensorboard --delay-grad-reduce", "0.3 to 0.19 have no --delay-grad-reduce"),
        ("--use-tp-pp-dp-mapping --moe-router-topk-limited-devices 2 --standalone-embedding-stage", None),
        ("--moe-token-dispatcher-type alltoall_seq", "0.16.1 refuses --moe-token-dispatcher-type"),
    ],
)
def test_the_guess_of_a_release_has_a_reason(argv: str, reason: str | None) -> None:
    sentence = read(*argv.split()).assumptions[-1]
    if reason is None:
        assert sentence.startswith("No release of Megatron-LM has all of these options")
    else:
        assert sentence.endswith(f" is assumed: no checkout was found, and {reason}.")


def test_options_that_exclude_releases_only_together_are_all_named() -> None:
    # each of the two nearer releases lacks one of the options
    catalogue = Catalogue(
        releases=("0.14.0", "0.15.3", "0.16.1"),
        variants=((0b101, Option(["--old"], "old", "true")), (0b011, Option(["--older"], "older", "true"))),
        masks={"--old": 0b101, "--older": 0b011},
        newest={},
    )
    note = read_with_catalogue(["--old", "--older"], catalogue)[2]
    assert note == (
        "Megatron-LM core 0.14.0 is assumed: no checkout was found, and 0.15 to 0.16 do not have all of --old, --older."
    )


def test_the_release_of_the_checkout_is_preferred_if_it_has_the_options() -> None:
    catalogue, choice = load_catalogue(), Choice(base="0.4.0", reason="the checkout is Megatron-LM core 0.4.1")
    table, _, note = read_with_catalogue(["--bf16"], catalogue, choice=choice)
    assert (table.release, note) == ("0.4.0", "Megatron-LM core 0.4.0 is assumed: the checkout is Megatron-LM core 0.4.1.")
    table, _, note = read_with_catalogue(["--moe-grouped-gemm"], catalogue, choice=choice)
    assert table.release == "0.5.0"
    assert note.endswith(" is assumed: the checkout is Megatron-LM core 0.4.1, and 0.4 has no --moe-grouped-gemm.")


@pytest.mark.parametrize(("words", "note"), [
    (["--bf16"], "Megatron-LM core 0.11.0 is assumed: no checkout was found, and a fork is based on 0.11. It has --x."),
    (["--use-custom-fsdp"], "Megatron-LM core 0.12.3 is assumed: no checkout was found, and a fork is based on 0.11, but 0.11 has "
                            "no --use-custom-fsdp. It has --x."),
])  # fmt: skip
def test_the_release_that_a_fork_is_based_on_is_preferred_if_it_has_the_options(words: list[str], note: str) -> None:
    fork = SimpleNamespace(fork=SimpleNamespace(base="0.11", name="a fork"), reason="It has --x.")
    assert read_with_catalogue(words, load_catalogue(), fork=fork)[2] == note  # type: ignore[arg-type]


EARLIER = {
    # release: options that it has, options that it lacks, by the parser of the copy named in tools/options_before_0_12.py
    "0.3.0": ("--norm-epsilon --no-query-key-layer-scaling --no-delay-grad-reduce --mmap-warmup --overlap-p2p-communication",
              "--data-impl --DDP-impl --context-parallel-size --use-mcore-models --tp-comm-overlap --layernorm-epsilon"),
    "0.4.0": ("--norm-epsilon --context-parallel-size --use-mcore-models --no-overlap-p2p-communication",
              "--moe-router-topk --no-rope-fusion --add-qkv-bias --layernorm-epsilon --no-query-key-layer-scaling"),
    "0.5.0": ("--moe-grouped-gemm --moe-token-dropping --rotary-interleaved --retro-workdir",
              "--moe-token-dispatcher-type --qk-layernorm --test-mode --decoupled-lr"),
    "0.6.0": ("--moe-token-dispatcher-type --qk-layernorm --use-dist-ckpt --disable-tp-comm-split-ag --yaml-cfg",
              "--moe-layer-recompute --ddp-bucket-size --tp-comm-overlap-rs-dgrad --retro-workdir --use-legacy-models"),
    "0.7.0": ("--moe-extended-tp --use-tp-pp-dp-mapping --async-save --enable-one-logger --use-mcore-models",
              "--rotary-base --cross-entropy-loss-fusion --ddp-average-in-collective --moe-token-dropping"),
    "0.8.0": ("--use-legacy-models --defer-embedding-wgrad-compute --delay-param-gather --local_rank --lr-wsd-decay-style",
              "--ckpt-format --decoder-first-pipeline-num-layers --overlap-param-gather-with-optimizer-step --local-rank"),
    "0.9.0": ("--decoder-first-pipeline-num-layers --ckpt-format --no-align-param-gather --fp8-param-gather",
              "--multi-latent-attention --expert-tensor-parallel-size --cp-comm-type --delay-param-gather"),
    "0.10.0": ("--multi-latent-attention --moe-layer-freq --num-distributed-optimizer-instances --standalone-embedding-stage",
               "--attention-backend --use-precision-aware-optimizer --account-for-loss-in-pipeline-split"),
    "0.11.0": ("--attention-backend --moe-router-topk-limited-devices --exp-avg-dtype --account-for-loss-in-pipeline-split",
               "--recompute-modules --use-custom-fsdp --moe-enable-deepep --mtp-num-layers --fp8-recipe"),
}  # fmt: skip


@pytest.mark.parametrize("release", EARLIER)
def test_options_of_releases_before_0_12(release: str) -> None:
    has, lacks = (words.split() for words in EARLIER[release])
    options = load_catalogue().table(release).options
    assert [flag for flag in has if flag not in options] == []
    assert [flag for flag in lacks if flag in options] == []


def test_defaults_and_choices_of_releases_before_0_12() -> None:
    tables = {release: load_catalogue().table(release) for release in EARLIER}
    implementations = {release: table.defaults["transformer_impl"] for release, table in tables.items()}
    assert {release for release, name in implementations.items() if name == "local"} == {"0.3.0", "0.4.0", "0.5.0"}
    positions = {release: table.options["--position-embedding-type"].choices for release, table in tables.items()}
    assert positions["0.7.0"] == ["learned_absolute", "rope"]
    assert positions["0.8.0"] == ["learned_absolute", "rope", "none"]
    assert tables["0.4.0"].options["--spec"].nargs == 2
    # TransformerConfig of the packages: apply_query_key_layer_scaling is True in 0.3.0 and False in 0.4.0
    scaling = {release: table.defaults["apply_query_key_layer_scaling"] for release, table in tables.items()}
    assert {release for release, value in scaling.items() if value} == {"0.3.0"}
    assert "Llama3Tokenizer" in (tables["0.8.0"].options["--tokenizer-type"].choices or ())


def test_a_difference_with_an_unknown_option_is_an_error() -> None:
    difference = Difference("0.1.0", "no-such-option")
    with pytest.raises(KeyError, match="no-such-option"):
        apply_difference(difference, [option_rows.flag("--bf16")])


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
