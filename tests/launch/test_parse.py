"""Megatron's part of a command line, compared with CPython's argparse, and the --info options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.info_options import FLAGS, InfoOptions
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.parse import parse
from tests.command import assert_refused, run, torchrun


def read(*argv: str) -> Arguments:
    return parse(argv, environ={}, folder=Path("/nowhere"))[0]


def info(*argv: str) -> InfoOptions:
    return parse(argv, environ={}, folder=Path("/nowhere"))[2]


def test_values_given_and_spelled() -> None:
    arguments = read("--num-layers=32", "--bf16", "--disable-bias-linear", "--hidden-size", "4096", "--num-layers", "24")
    assert arguments.values["num_layers"] == 24
    assert arguments.values["bf16"] is True
    assert arguments.values["add_bias_linear"] is False
    assert arguments.values["seq_length"] is None
    assert arguments.given == {"num_layers", "bf16", "add_bias_linear", "hidden_size"}
    assert arguments.spelled["add_bias_linear"] == "--disable-bias-linear"
    assert arguments.release == "0.16.1"
    assert arguments.source == "catalogue of Megatron-LM core 0.16.1"
    assert arguments.get("no_such_dest", 7) == 7


@pytest.mark.parametrize(
    ("argv", "dest", "value"),
    [
        ("--moe-layer-freq [0]*3+[1]*58", "moe_layer_freq", (0,) * 3 + (1,) * 58),
        ("--moe-layer-freq ([1]+[0]*2)*2", "moe_layer_freq", (1, 0, 0, 1, 0, 0)),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--window-size (128,0)", "window_size", (128, 0)),
        ("--rampup-batch-size 16 16 5859375", "rampup_batch_size", (16, 16, 5859375)),
        ("--recompute-modules core_attn mlp --bf16", "recompute_modules", ("core_attn", "mlp")),
        ("--cp-comm-type a2a", "cp_comm_type", ("a2a",)),
        ("--exit-signal SIGINT", "exit_signal", 2),
        ("--lr 6.0e-5", "lr", 6.0e-5),
        ("--save ${CHECKPOINT_SAVE_PATH}", "save", "${CHECKPOINT_SAVE_PATH}"),
        ("--no-rl-partial-rollouts", "rl_partial_rollouts", False),
        ("--rl-partial-rollouts", "rl_partial_rollouts", True),
        ("--loss-scale -1", "loss_scale", -1.0),
        ("--data-path 0.2 /a 0.8 /b pretrain_gpt.py --bf16", "data_path", ("0.2", "/a", "0.8", "/b")),
        ("--use-flash-attn", "use_flash_attn", True),
        ("--recompute-activations", "recompute_activations", True),
        ("--no-position-embedding", "add_position_embedding", False),
        ("--use-rotary-position-embeddings", "use_rotary_position_embeddings", True),
    ],
)
def test_values_are_parsed(argv: str, dest: str, value: object) -> None:
    assert read(*argv.split()).values[dest] == value


@pytest.mark.parametrize(
    ("argv", "option", "words"),
    [
        (["--num-layers", "twelve"], "--num-layers", "'twelve' is not an integer"),
        (["--num-layers"], "--num-layers", "has no value"),
        (["--num-layers", "--bf16"], "--num-layers", "has no value"),
        (["--hiden-size", "8"], "--hiden-size", "did you mean --hidden-size?"),
        (["--num-layer", "8", "--bf17"], "--num-layer, --bf17", "did you mean --num-layers and --bf16?"),
        (["--position-embedding-type", "rotated"], "--position-embedding-type", "rope"),
        (["--bf16=1"], "--bf16", "takes no value"),
        (["--num-layers", "2", "4"], "--num-layers", "'4' after it is not a script, an option or a value"),
        (["--num-layers", "2", ""], "--num-layers", "set the shell variable"),
        (["${UNSET}", "--bf16"], "'${UNSET}'", "is not an option or the value of one"),
        (["--num-layers 2"], "--num-layers", "quotes"),
        (["--moe-layer-freq", "[0]*99999999999"], "--moe-layer-freq", "pattern"),
        (["--moe-layer-freq", "[__import__('os')]"], "--moe-layer-freq", "pattern"),
        (["--checkpoint-activations", "--use-mcore-models"], "--checkpoint-activations", "--recompute-granularity full"),
        (["--checkpoint-activations", "--info-megatron", "0.16.1"], "--checkpoint-activations", "--recompute-granularity full"),
        (["--batch-size", "4", "--use-mcore-models"], "--batch-size", "--micro-batch-size"),
        (
            ["--activations-checkpoint-method", "uniform", "--use-mcore-models"],
            "--activations-checkpoint-method",
            "--recompute-method",
        ),
        (["--frobnicate", "--info-strict"], "--frobnicate", "--info-megatron"),
        (["--frobnicate", "--bf17", "--info-strict"], "--frobnicate, --bf17", "did you mean --bf16?"),
        (["--moe-latent-size", "64", "--info-megatron", "0.12"], "--moe-latent-size", "--info-megatron 0.16.1"),
    ],
)
def test_errors_name_option_fault_and_remedy(argv: list[str], option: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read(*argv)
    assert error.value.option == option
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_underscores_among_dashes_are_read_and_named() -> None:
    """Scripts of forks and NVIDIA's translator for Megatron-Bridge print them. Megatron's own parser refuses them."""
    found = read("--hidden_size", "8", "--num-layers", "2", "--dataloader_type", "cyclic")
    assert (found.values["hidden_size"], found.values["dataloader_type"]) == (8, "cyclic")
    assert found.unknown[0].startswith("--hidden_size, --dataloader_type: these spellings are read with dashes.")


@pytest.mark.parametrize(("word", "tokens"), [("32k", 32768), ("128K", 131072), ("8192", 8192)])
def test_a_length_may_be_in_thousands(word: str, tokens: int) -> None:
    found = read("--seq-length", word)
    assert found.values["seq_length"] == tokens
    assert any(f"--seq-length {word} is read as" in each for each in found.warnings) == (not word.isdecimal())


WORDS = st.lists(
    st.sampled_from(
        ["--num-layers", "--bf16", "--lr=1e-3", "--lr", "--data-path", "-1", "-1.5", "8", "x y", "-", "--seed=-3", "--split"]
    )
)


@given(WORDS)
def test_parsing_agrees_with_argparse(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--split", type=str)
    try:
        expected, strays = parser.parse_known_args(words)
        wrong = bool(strays)
    except (argparse.ArgumentError, SystemExit):
        wrong = True
    if wrong:
        with pytest.raises(InputError):
            read(*words)
        return
    values = read(*words).values
    for dest, value in vars(expected).items():
        assert values[dest] == (tuple(value) if isinstance(value, list) else value)


def test_info_options_are_parsed() -> None:
    options = info(
        "--info-gpu",
        "H100-80GB",
        "--bf16",
        "--info-gpu-memory=80GiB",
        "--info-json",
        "-",
        "--info-launch",
        "--info-detail=tree,full",
    )
    assert options == InfoOptions(gpu="H100-80GB", gpu_memory=80 * 2**30, json="-", launch=True, detail=("tree", "full"))
    assert info() == InfoOptions(engine="formula", detail=(), tolerance=0.01)


@pytest.mark.parametrize(
    ("argv", "option", "words"),
    [
        (["--info-gup", "x"], "--info-gup", "--info-gpu"),
        (["--info-det", "full"], "--info-det", "--info-detail"),
        (["--info-detail", "long"], "--info-detail", "use summary, memory, time, groups, communication, tree, full or line"),
        (["--info-gpu-memory", "lots"], "--info-gpu-memory", "80GiB"),
        (["--info-gpu"], "--info-gpu", "no value"),
        (["--info-tolerance", "2"], "--info-tolerance", "0.01"),
    ],
)
def test_errors_of_info_options(argv: list[str], option: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        info(*argv)
    assert error.value.option == option
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("2023", "2023"), ("0.16.1", "0.16.1"), ("core_v0.16.1", "0.16.1"), ("0.16.0", "0.16.1"), ("0.19", "0.19.0"),
        ("0.8", "0.8.0"), ("0.8.0", "0.8.0"), ("core_v0.8.0", "0.8.0"), ("core_r0.8.0", "0.8.0"), ("0.10", "0.10.0"),
        ("0.3", "0.3.0"), ("0.1", None), ("megatron", None),
    ],
)  # fmt: skip
def test_a_release_is_found_by_its_usual_names(name: str, release: str | None) -> None:
    assert load_catalogue().find_release(name) == release


@pytest.mark.parametrize("option", ["--info-rank", "--info-layers"])
def test_options_of_a_recording_need_a_recording(option: str) -> None:
    assert_refused(run(*torchrun(1), *"--num-layers 2 --hidden-size 64 --num-attention-heads 4".split(), option, "1"), option)


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("--num-layers", "2", "--help")])
def test_help_lists_every_info_option(argv: tuple[str, ...]) -> None:
    outcome = run(*argv)
    assert outcome.status == 0
    assert {flag for flag in FLAGS if flag + " " not in outcome.out} == set()
