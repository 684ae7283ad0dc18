"""Launches of ms-swift, whose flags take values and whose model is named instead of described."""

from __future__ import annotations

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.launch.forks.swift import model_of, without_values_of_flags
from analyzer.launch.options.catalogue import load_catalogue

KNOWN = load_catalogue().newest
LAUNCH = "--dataset x --packing true --finetune true --max_length 4096 --recompute_granularity full --recompute_method uniform"


def test_values_of_flags_with_one_word() -> None:
    """`--finetune true` of examples/megatron; a flag without dashes has the same name in ms-swift and in Megatron-LM."""
    words = "--finetune true --bf16 false --lr 1e-5 --profile=true --save true"
    assert without_values_of_flags(words.split(), KNOWN) == ("--finetune", "--lr", "1e-5", "--profile", "--save", "true")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-14B"),
        ("Qwen3-4B-Instruct-2507-mcore", "Qwen/Qwen3-4B"),
        ("/models/Qwen3-8B-FP8/", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("AIDC-AI/Marco-o1", "AIDC-AI/Marco-o1"),
    ],
)
def test_model(name: str, published: str) -> None:
    """Checkpoints of a published model have its sizes; other names are not changed."""
    assert model_of({"--model": [name]}, {}) == published


def test_sizes_in_the_launch_take_precedence() -> None:
    """A launch with the number of layers gives its own sizes."""
    assert model_of({"--model": ["Qwen/Qwen3-8B"], "--num_layers": ["12"]}, {}) is None
    assert model_of({}, {"--num-layers": ["12"], "--load": ["Qwen3-8B-mcore"]}) is None


def test_launch_without_sizes() -> None:
    """Qwen2.5-14B has 14.77 billion parameters by its model card ('14.7B')."""
    launch = f"--model Qwen/Qwen2.5-14B --load_safetensors true --tensor_model_parallel_size 4 {LAUNCH} --recompute_num_layers 1"
    report = analyze(launch, environ={"NNODES": "2", "NPROC_PER_NODE": "4"}, folder="/nowhere")
    assert report.job.parallel.world_size == 8
    assert report.parameters_unpadded == 14_770_033_664
    assert report.job.precision.parameters == "bf16"
    assert not report.warnings


def test_unknown_model() -> None:
    """A model that the catalogue lacks is named, with the remedy to give its config.json."""
    with pytest.raises(InputError, match=r"config\.json"):
        analyze(f"--model Qwen/Qwen3-Next-80B-A3B {LAUNCH}", environ={}, folder="/nowhere")
