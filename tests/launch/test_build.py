"""The training job that is built from the arguments of a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.specs import HardwareSpec, TrainingJob
from tests.data_files import measured_records, truth_records
from tests.job_of import BASE, HOPPER, job_of

LLAMA_3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B"
)


def test_llama_3_8b() -> None:
    job = job_of("--tensor-model-parallel-size 4 --sequence-parallel", base=LLAMA_3_8B, gpus=16)
    model, parallel = job.model, job.parallel
    assert (model.kv_channels, model.num_query_groups, model.padded_vocab_size) == (128, 8, 128512)
    assert (model.activation, model.gated, model.normalization, model.position_embedding) == ("swiglu", True, "RMSNorm", "rope")
    assert (model.bias_linear, model.bias_qkv, model.tied_embeddings, model.rope_fusion) == (False, False, False, True)
    assert (parallel.data, parallel.nodes, parallel.gpus_per_node) == (4, 2, 8)
    assert job.batch.microbatches == 32
    assert job.precision.gradients == "fp32"
    assert job.optimizer.distributed
    assert job.megatron == "0.16.1"


def test_qkv_bias_without_other_biases() -> None:
    model = job_of("--add-qkv-bias", base=LLAMA_3_8B).model
    assert (model.bias_linear, model.bias_qkv) == (False, True)


def test_fusions_by_default_and_turned_off() -> None:
    on = job_of("").model
    assert (on.bias_activation_fusion, on.bias_dropout_fusion, on.masked_softmax_fusion) == (True, True, True)
    off = job_of("--no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion").model
    assert (off.bias_activation_fusion, off.bias_dropout_fusion, off.masked_softmax_fusion) == (False, False, False)
    assert not job_of("--disable-bias-linear").model.bias_activation_fusion
    assert job_of("--disable-bias-linear --swiglu").model.bias_activation_fusion


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("", "unfused"),
        ("--cross-entropy-loss-fusion", "native"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "te"),
        ("--cross-entropy-fusion-impl te", "unfused"),
    ],
)
def test_cross_entropy(line: str, loss: str) -> None:
    assert job_of(line).model.cross_entropy == loss


def test_squared_relu() -> None:
    assert job_of("--squared-relu --disable-bias-linear").model.activation == "squared_relu"
    assert job_of("--squared-relu --no-bias-gelu-fusion").model.bias_linear


def test_positions() -> None:
    assert job_of("--use-rotary-position-embeddings --no-position-embedding").model.position_embedding == "rope"
    assert job_of("--position-embedding-type none").model.position_embedding == "none"
    assert not job_of("--position-embedding-type rope --no-rope-fusion").model.rope_fusion
    assert not job_of("").model.rope_fusion


def test_query_key_layer_scaling() -> None:
    line = "--apply-query-key-layer-scaling"
    job = job_of(line)
    assert job.model.attention_softmax_in_fp32
    assert any("NVTE_APPLY_QK_LAYER_SCALING=1" in each for each in job.assumptions)
    assert not any("QK_LAYER" in each for each in job_of(line + " --transformer-impl local").assumptions)
    with pytest.raises(InputError, match=r"^--apply-query-key-layer-scaling: is off and NVTE_APPLY_QK_LAYER_SCALING is 1"):
        job_of("", environ={"NVTE_APPLY_QK_LAYER_SCALING": "1"})


def test_code_of_2023() -> None:
    job = job_of("--use-flash-attn --swiglu --use-distributed-optimizer", release="2023")
    assert job.megatron == "2023"
    assert (job.model.implementation, job.model.attention_backend) == ("legacy", "flash")
    assert job.model.apply_query_key_layer_scaling
    assert job.precision.gradients == "fp32"
    engine = job_of("--transformer-impl transformer_engine", release="2023")
    assert engine.model.implementation == "transformer_engine"
    assert engine.warnings[0].startswith("--transformer-impl transformer_engine: legacy models")


def test_the_2023_code_reduces_sizes_to_the_world() -> None:
    job = job_of("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4", release="2023", gpus=4)
    assert (job.parallel.tensor, job.parallel.pipeline) == (4, 1)
    assert any("reduces" in each for each in job.assumptions)


def test_legacy_models() -> None:
    assert job_of("--use-legacy-models --ckpt-format torch --transformer-impl local").model.implementation == "legacy"
    job = job_of("--use-legacy-models --ckpt-format torch")
    assert job.model.implementation == "transformer_engine"
    assert job.warnings[0].startswith("--transformer-impl transformer_engine: legacy models")


def test_nan_check_is_off_under_dynamic_loss_scaling() -> None:
    fp16 = BASE.replace("--bf16", "--fp16")
    assert job_of("").flags.check_for_nan_in_loss_and_grad
    assert not job_of("", base=fp16).flags.check_for_nan_in_loss_and_grad
    assert job_of("--loss-scale 1024", base=fp16).flags.check_for_nan_in_loss_and_grad


def test_the_cublas_workspace_config_is_read_from_the_environment() -> None:
    flags = job_of("", environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}).flags
    assert flags.cublas_workspace_config == ":4096:8"


def test_assumptions_are_sentences_and_not_repeated() -> None:
    assumptions = job_of("--tensor-model-parallel-size 2 --context-parallel-size 2 --load /dummy --deterministic-mode").assumptions
    assert all(each.endswith(".") and "\n" not in each for each in assumptions)
    assert len(set(assumptions)) == len(assumptions)


def job_from(record_argv: list[str], *, gpus: int, environ: dict[str, str], gpu: HardwareSpec) -> TrainingJob:
    arguments, world, _ = parse(["--nproc-per-node", str(gpus), *record_argv], environ=environ, folder=Path("/nowhere"))
    return build(arguments, world, environ=environ, gpu=gpu, folder=Path("/nowhere"))


def test_dense_models_of_megatron() -> None:
    dense = 0
    for record in truth_records("parameters.json"):
        if "--num-experts" in record["argv"]:
            continue  # in derive/test_moe
        job, layout = job_from(record["argv"], gpus=record["world_size"], environ={}, gpu=HOPPER), record["layout"]
        assert job.model.vocab_size == record["tokenizer_vocab"]
        assert job.model.padded_vocab_size == record["padded_vocab_size"]
        assert job.model.ffn_hidden_size == record["ffn_hidden_size"]
        parallel = job.parallel
        assert (parallel.tensor, parallel.pipeline, parallel.context, parallel.data) == tuple(
            layout[k] for k in ("tp", "pp", "cp", "dp")
        )
        assert parallel.virtual_pipeline == layout["vpp"]
        dense += 1
    assert dense == 36


def test_every_measured_launch_is_accepted() -> None:
    capability = {"A100-80GB": (8, 0), "H100-80GB": (9, 0), "GB200": (10, 0), "B200": (10, 0)}
    accepted = 0
    for file in ("b200.json", "megatron_ci.json"):
        for record in measured_records(file):
            gpu = HardwareSpec(name=record["gpu"], compute_capability=capability[record["gpu"]])
            gpus = record["nodes"] * record["gpus_per_node"]
            job_from(record["argv"], gpus=gpus, environ=record["env"], gpu=gpu)
            accepted += 1
    assert accepted == 127
