"""Invalid command lines: exit status 2 and an error of one line with the option and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import assert_refused, run

BASE = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 1e-4 --train-iters 10 "
    "--info-gpu H100-80GB"
)

INVALID = [
    # values outside their range
    ("--hidden-dropout 2", "--hidden-dropout"),
    ("--attention-dropout -0.5", "--attention-dropout"),
    ("--position-embedding-type rope --rotary-percent 0", "--rotary-percent"),
    ("--nproc-per-node eight", "--nproc-per-node"),
    # sizes that are not divisible
    ("--num-attention-heads 15", "--num-attention-heads"),
    ("--num-layers 23 --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
    ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size"),
    ("--tensor-model-parallel-size 16", "--tensor-model-parallel-size"),
    ("--pipeline-model-parallel-size 5", "--pipeline-model-parallel-size"),
    ("--context-parallel-size 3", "--context-parallel-size"),
    ("--global-batch-size 63", "--global-batch-size"),
    ("--micro-batch-size 3", "--global-batch-size"),
    ("--seq-length 2047 --tensor-model-parallel-size 2 --sequence-parallel", "--seq-length"),
    ("--context-parallel-size 2 --seq-length 2046", "--seq-length"),
    ("--group-query-attention --num-query-groups 3", "--num-query-groups"),
    ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5", "--num-layers-per-virtual-pipeline-stage"),
    ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", "--num-distributed-optimizer-instances"),
    ("--seq-length 4096", "--max-position-embeddings"),
    # options that do not exist
    ("--num-layer 24", "--num-layer"),
    ("--sequence-paralel", "--sequence-paralel"),
    ("--info-strict --bogus 3", "--bogus"),
    ("--info-gpus H100", "--info-gpus"),
    ("--checkpoint-activations --use-mcore-models", "--checkpoint-activations"),
    ("--activations-checkpoint-method uniform --use-mcore-models", "--activations-checkpoint-method"),
    # values of the wrong type, missing values, and too many values
    ("--num-layers twelve", "--num-layers"),
    ("--num-layers 2.5", "--num-layers"),
    ("--lr fast", "--lr"),
    ("--num-layers", "--num-layers"),
    ("--bf16 1", "--bf16"),
    ("--normalization BatchNorm", "--normalization"),
    ("--position-embedding-type albi", "--position-embedding-type"),
    ("--recompute-granularity partial", "--recompute-granularity"),
    ("--nnodes two", "--nnodes"),
    ("--nproc-per-node gpu", "--nproc-per-node"),
    # zero and negative
    ("--num-layers 0", "--num-layers"),
    ("--hidden-size -1024", "--hidden-size"),
    ("--num-attention-heads 0", "--num-attention-heads"),
    ("--seq-length 0", "--seq-length"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size"),
    ("--pipeline-model-parallel-size -2", "--pipeline-model-parallel-size"),
    ("--micro-batch-size 0", "--micro-batch-size"),
    ("--global-batch-size -64", "--global-batch-size"),
    ("--ffn-hidden-size -4", "--ffn-hidden-size"),
    ("--vocab-size -5", "--vocab-size"),
    ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by"),
    ("--nnodes 0", "--nnodes"),
    ("--nnodes 3:1", "--nnodes"),
    # contradictory options, and options that require another option
    ("--fp16", "--fp16"),
    ("--swiglu --squared-relu", "--swiglu"),
    ("--recompute-granularity full", "--recompute-granularity"),
    ("--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1", "--recompute-method"),
    ("--overlap-param-gather", "--overlap-param-gather"),
    ("--use-distributed-optimizer --optimizer sgd", "--use-distributed-optimizer"),
    ("--num-layers-per-virtual-pipeline-stage 2", "--pipeline-model-parallel-size"),
    ("--rampup-batch-size 16 16 1000", "--rampup-batch-size"),
    ("--tp-comm-overlap", "--tp-comm-overlap"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etx", "--pipeline-model-parallel-layout"),
    # files
    ("--yaml-cfg nowhere.yaml", "--yaml-cfg"),
    ("--info-megatron nowhere", "--info-megatron"),
    ("--info-json nowhere/report.json", "--info-json"),
    ("--info-json .", "--info-json"),
    # unknown vocabulary sizes
    ("--tokenizer-type NullTokenizer", "--vocab-size"),
    ("--info-strict --tokenizer-type HuggingFaceTokenizer", "--tokenizer-type"),
    ("--info-strict --tokenizer-type HuggingFaceTokenizer --tokenizer-model nobody/nothing", "--tokenizer-type"),
    ("--info-strict --tokenizer-type SentencePieceTokenizer --tokenizer-model nowhere.model", "--tokenizer-type"),
    ("--tokenizer-type SentencePieceTokenize", "--tokenizer-type"),
    # GPUs and options of this program
    ("--info-gpu H1000", "--info-gpu"),
    ("--info-gpu-memory lots", "--info-gpu-memory"),
    ("--info-gpu-memory 0", "--info-gpu-memory"),
    ("--info-gpu-memory", "--info-gpu-memory"),
    ("--info-detail some", "--info-detail"),
    ("--info-detail memory,some", "--info-detail"),
    ("--info-detail ,", "--info-detail"),
    ("--info-detail", "--info-detail"),
    ("--info-engine magic", "--info-engine"),
    # accepted by Megatron, but not modelled or incomplete
    ("--num-experts 8 --moe-token-dispatcher-type flex", "--moe-token-dispatcher-type"),
    ("--mtp-num-layers 1", "--mtp-num-layers"),
    ("--fp4-format e2m1", "--fp4-format"),
]


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without environment variables that affect the result."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "HF_HOME", "HF_HUB_CACHE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def test_the_base_command_is_valid() -> None:
    outcome = run(*BASE.split())
    assert (outcome.status, outcome.err) == (0, "")


@pytest.mark.parametrize(("words", "option"), INVALID, ids=lambda value: value if value.startswith("--") and " " in value else "")
def test_invalid_input_is_an_error(words: str, option: str) -> None:
    assert_refused(run(*BASE.split(), *words.split()), option)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--hiden-size", "--hidden-size"),
        ("--sequence-paralel", "--sequence-parallel"),
        ("--tensor-model-paralell-size", "--tensor-model-parallel-size"),
        ("--info-gpus", "--info-gpu"),
    ],
)
def test_misspelt_options_have_a_suggestion(misspelt: str, meant: str) -> None:
    assert run(*BASE.split(), misspelt, "8").err.rstrip().endswith(f"did you mean {meant}?")


def test_the_default_of_expert_tensor_parallelism() -> None:
    """core/parallel_state.py: the default of expert_tensor_parallel_size is tensor_model_parallel_size."""
    words = "--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --sequence-parallel".split()
    assert "--expert-tensor-parallel-size 1" in run(*BASE.split(), *words).err
    assert run(*BASE.split(), *words, "--expert-tensor-parallel-size", "1").status == 0


def test_the_header_lists_experts_and_fp8() -> None:
    plain = run(*BASE.split()).out
    assert "experts" not in plain.partition("──")[0]
    assert "FP8" not in plain.partition("──")[0]
    header = run(*BASE.split(), *"--num-experts 8 --moe-router-topk 4 --fp8-format hybrid".split()).out.partition("──")[0]
    assert "8 experts (top 4)" in header
    assert "and FP8 (delayed)" in header


def test_the_suggested_global_batch_size_is_valid() -> None:
    result = run(*BASE.split(), "--global-batch-size", "63")
    assert result.err.rstrip().endswith("for example 64")
    assert run(*BASE.split(), "--global-batch-size", "64").status == 0


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"a": "b"', "\x00\x01"])
def test_an_invalid_vocabulary_file_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(content)
    assert_refused(run(*BASE.split(), "--vocab-file", "vocab.json"), "--vocab-file")


def test_an_unwritable_report_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    assert_refused(run(*BASE.split(), "--info-json", "report.json"), "--info-json")


def test_a_call_without_arguments_is_an_error() -> None:
    outcome = run()
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
