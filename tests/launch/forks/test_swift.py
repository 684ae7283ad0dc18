"""Launches of ms-swift, whose flags take values and whose model is named instead of described."""

from __future__ import annotations

import pytest

from analyzer.api import analyze
from analyzer.errors import InputError
from analyzer.launch.forks.swift import model_of, without_values_of_flags
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.specs.job import TrainingJob

NODE = {"NPROC_PER_NODE": "8"}
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


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ("", 4099),
        ("--tensor_model_parallel_size 4", 4099),
        ("--tensor_model_parallel_size 4 --sequence_parallel true", 4100),
        ("--tensor_model_parallel_size 4 --sequence_parallel true --fp8_format hybrid --fp8_recipe blockwise", 4608),
        ("--tensor_model_parallel_size 2 --sequence_parallel true --fp8_format e4m3 --fp8_recipe mxfp8", 4160),
        ("--fp8_format hybrid --fp8_recipe tensorwise", 4112),
        ("--context_parallel_size 2 --tensor_model_parallel_size 2 --sequence_parallel true --attention_backend fused", 4352),
    ],
)
def test_sequences_are_padded(options: str, tokens: int) -> None:
    """`get_padding_to` of ms-swift: the ranks that share a sequence, times 16 in FP8, 32 in mxfp8, 128 in blocks; 64 for cuDNN."""
    launch = f"--model Qwen/Qwen3-8B --max_length 4099 --packing true --dataset x {options} --info-gpu B200"
    assert analyze(launch, environ=NODE, folder="/nowhere").job.batch.seq_length == tokens


def test_unknown_model() -> None:
    """A model that the catalogue lacks is named, with the remedy to give its config.json."""
    with pytest.raises(InputError, match=r"config\.json"):
        analyze(f"--model Qwen/Qwen3-Next-80B-A3B {LAUNCH}", environ={}, folder="/nowhere")


def job_of(options: str) -> TrainingJob:
    launch = f"--model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 4 {LAUNCH} --recompute_num_layers 1 {options}"
    return analyze(launch, environ=NODE, folder="/nowhere").job


def test_defaults_of_experts_and_rotation() -> None:
    """MegatronArguments has them (swift/megatron/arguments/megatron_args.py of ms-swift 4.6), and they replace config.json."""
    job = job_of("")
    assert job.model.moe is not None
    assert (job.model.moe.grouped_gemm, job.model.moe.dispatcher, job.model.moe.router_dtype) == (True, "alltoall", "fp32")
    assert job.model.moe.aux_loss_coeff == 0
    assert not job.model.rope_fusion
    assert job_of("--apply_rope_fusion true").model.rope_fusion


@pytest.mark.parametrize("spelling", ["--use_distributed_optimizer", "--use-distributed-optimizer"])
def test_a_default_that_is_false(spelling: str) -> None:
    assert job_of("").optimizer.distributed
    assert not job_of(f"{spelling} false").optimizer.distributed


def test_experts_that_run_one_after_the_other() -> None:
    moe = job_of("--moe_grouped_gemm false").model.moe
    assert moe is not None
    assert not moe.grouped_gemm


def test_router_in_the_dtype_of_the_activations() -> None:
    moe = job_of("--moe_router_dtype none").model.moe
    assert moe is not None
    assert moe.router_dtype != "fp32"


def test_16_bit_gradients() -> None:
    """ms-swift accumulates in fp32 if main_grads_dtype is fp32 (`_map_dtype`)."""
    job = job_of("--main_grads_dtype bf16 --use_precision_aware_optimizer true")
    assert job.precision.gradients == "bf16"
    assert job_of("").precision.gradients == "fp32"
