"""What --info-model adds to a launch with and without a training script."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer import analyze
from analyzer.errors import InputError
from analyzer.launch.parse import parse, words_of_launch
from analyzer.launch.training_command import training_command
from tests.launch.model_config.configurations import options, words

LLAMA = "meta-llama/Llama-3.1-8B"


def test_a_launch_without_a_script_is_complete() -> None:
    report = analyze(f"--nnodes 2 --nproc-per-node 8 --info-model {LLAMA} --info-gpu H100-80GB", environ={}, folder="/nowhere")
    job = report.job
    assert (job.parallel.tensor, job.parallel.pipeline, job.parallel.data) == (1, 1, 16)
    assert (job.batch.micro_batch_size, job.batch.global_batch_size, job.batch.seq_length) == (1, 16, 4096)
    assert job.precision.parameters == "bf16"
    assert job.optimizer.distributed


def test_what_is_assumed_is_stated() -> None:
    text = " ".join(analyze(f"--info-model {LLAMA} --seq-length 2048", environ={}, folder="/nowhere").assumptions)
    assert "because the launch has no training script: --micro-batch-size 1, " in text
    assert "--seq-length 4096" not in text
    assert f"The model is that of {LLAMA}" in text


def test_the_launch_takes_precedence() -> None:
    line = f"--info-model {LLAMA} --num-layers 4 --micro-batch-size 2 --fp16 --tensor-model-parallel-size 2 --seq-length 1024"
    job = analyze(f"--nproc-per-node 8 {line}", environ={}, folder="/nowhere").job
    assert (job.model.num_layers, job.model.hidden_size, job.parallel.tensor) == (4, 4096, 2)
    assert (job.batch.micro_batch_size, job.batch.seq_length, job.precision.parameters) == (2, 1024, "fp16")


def test_a_script_gets_the_model_alone() -> None:
    found = options(words(LLAMA, script=True))
    assert not {"--micro-batch-size", "--bf16", "--use-distributed-optimizer", "--seq-length"} & set(found)
    assert found["--num-layers"] == "32"
    with pytest.raises(InputError, match="--seq-length: is missing"):
        analyze(f"pretrain_gpt.py --info-model {LLAMA} --micro-batch-size 1 --bf16", environ={}, folder="/nowhere")


def test_the_sequence_is_no_longer_than_the_model_allows() -> None:
    assert options(words("openai-community/gpt2"))["--seq-length"] == "1024"
    assert options(words("facebook/opt-125m"))["--seq-length"] == "2048"


def test_rotary_models_take_longer_sequences_and_learned_positions_do_not() -> None:
    assert options(words("meta-llama/Llama-2-7b-hf", "--seq-length 16384"))["--max-position-embeddings"] == "16384"
    assert options(words("openai-community/gpt2", "--seq-length 2048"))["--max-position-embeddings"] == "1024"
    assert options(words("facebook/opt-125m"))["--max-position-embeddings"] == "2050"


def test_a_tokenizer_in_the_launch_replaces_the_vocabulary() -> None:
    found = options(words(LLAMA, "--tokenizer-type TikTokenizer --vocab-size 1000", script=True))
    assert (found["--tokenizer-type"], found["--vocab-size"]) == ("TikTokenizer", "1000")
    assert "NullTokenizer" not in words(LLAMA, "--tokenizer-type TikTokenizer", script=True)


@pytest.mark.parametrize(("release", "size"), [("0.16.1", "128255"), ("0.17.1", "128255"), ("0.18.2", "128256")])
def test_vocab_size_of_the_null_tokenizer(release: str, size: str) -> None:
    assert options(words(LLAMA, release=release))["--vocab-size"] == size


@pytest.mark.parametrize("line", ["--optimizer sgd", "--use-torch-fsdp2", "--optimizer=muon"])
def test_another_way_to_keep_the_optimizer(line: str) -> None:
    assert "--use-distributed-optimizer" not in words(LLAMA, line)
    assert "--use-distributed-optimizer" in words(LLAMA, "--optimizer adam")


def test_experts_use_grouped_gemm_and_all_to_all() -> None:
    found = options(words("mistralai/Mixtral-8x7B-v0.1"))
    assert (found["--moe-token-dispatcher-type"], "--moe-grouped-gemm" in found) == ("alltoall", True)
    assert (
        options(words("mistralai/Mixtral-8x7B-v0.1", "--moe-token-dispatcher-type flex"))["--moe-token-dispatcher-type"] == "flex"
    )


def test_experts_with_biases_are_not_split() -> None:
    assert options(words("openai/gpt-oss-20b", "--tensor-model-parallel-size 2"))["--expert-tensor-parallel-size"] == "1"
    assert "--expert-tensor-parallel-size" not in words("mistralai/Mixtral-8x7B-v0.1")


def test_a_release_without_an_option_of_the_model_is_named() -> None:
    with pytest.raises(InputError, match="the model needs --norm-epsilon, which Megatron-LM 2023 does not have"):
        parse(["--info-model", LLAMA, "--info-megatron", "2023"], environ={}, folder=Path("/nowhere"))


def test_the_model_of_a_recorded_launch_is_kept() -> None:
    recorded = ["program", "--info-model", LLAMA, "--info-record", "trace", "--seq-length", "512"]
    assert words_of_launch(["--info-check", "trace"], recorded=recorded) == [
        *("--info-model", LLAMA, "--seq-length", "512"),
        *("--info-check", "trace"),
    ]
    other = ["--info-model=gpt2", "--info-check", "trace"]
    assert words_of_launch(other, recorded=recorded) == other


def test_a_training_script_is_not_started_without_its_model() -> None:
    with pytest.raises(InputError, match="--info-print-options"):
        training_command(["pretrain_gpt.py", "--info-model", LLAMA], folder=Path("/nowhere"))
