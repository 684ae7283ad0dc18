"""Parameter counts of published models, compared with those of Hugging Face's model classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analyzer import analyze
from analyzer.api import Launch, read_launch
from analyzer.passes.stages import full_model
from analyzer.predict.parameter_counts import ParameterCounts, parameter_counts
from tests.data_files import data_file
from tests.frameworks.gemma_containers import gemma_container
from tests.launch.model_config.configurations import published, write_config

PUBLISHED = json.loads(data_file("published_models.json").read_text())
DIFFERENCES = {
    # its layers have one LayerNorm, those of Megatron-LM two
    "tiiuae/falcon-7b": 32 * 2 * 4544,
    # the correction biases of the router are parameters of the model class, and buffers of Megatron-LM
    "baidu/ERNIE-4.5-21B-A3B-PT": -27 * 64,
    "baidu/ERNIE-4.5-300B-A47B-PT": -51 * 64,
    # norms of q and k over all heads, and in Megatron-LM over each head
    "MiniMaxAI/MiniMax-M2": -62 * (47 + 7) * 128,
    "allenai/OLMoE-1B-7B-0924": -16 * (15 + 15) * 128,
    # five layers whose values are their keys, and in Megatron-LM have rows of the projection
    "google/gemma-4-26B-A4B": 5 * 2 * 512 * 2816,
}
"""Parameters that Megatron-LM has more than the model class."""
NEEDED = {
    "deepseek-ai/DeepSeek-V3.2": ("--info-megatron", "0.18.2"),
    "zai-org/GLM-5": ("--info-megatron", "0.18.2"),
    "deepseek-ai/DeepSeek-V4-Flash": ("--info-megatron", "0.19.0"),
    "deepseek-ai/DeepSeek-V4-Pro": ("--info-megatron", "0.19.0"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("--expert-model-parallel-size", "8"),
}
"""Options that a model needs: a release that has its layers, and fewer experts on each rank."""
FROM_FILE = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "ibm-granite/granite-4.0-h-tiny",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "google/gemma-7b",
    "facebook/opt-6.7b",
    "openai-community/gpt2",
)


def launch_of(reference: str | Path, *more: str) -> Launch:
    return read_launch(["--nproc-per-node", "8", "--info-model", str(reference), *more], environ={}, folder=Path("/nowhere"))


def counts_of(reference: str | Path, *more: str) -> ParameterCounts:
    """The numbers of parameters as in a report."""
    job = launch_of(reference, *more).job
    return parameter_counts(job.model, full_model(job))


@pytest.mark.parametrize("name", PUBLISHED["parameters"])
def test_published_models(name: str, tmp_path: Path) -> None:
    config = published()[name]["config"]
    if config["model_type"] in ("gemma2", "gemma3_text", "gemma3", "gemma4", "exaone4"):  # its layers are those of Megatron-Bridge
        (tmp_path / "config.yaml").write_text(gemma_container(config))
        found = read_launch(["config.yaml", "--info-world-size", "8"], environ={}, folder=tmp_path).job
        assert parameter_counts(found.model, full_model(found)).unpadded == PUBLISHED["parameters"][name] + DIFFERENCES.get(name, 0)
        return
    if config["model_type"] in ("glm4", "glm4v"):  # its layers are those of ms-swift
        words = ["megatron", "sft", "--model", name, "--max_length", "512", "--info-world-size", "1"]
        found = read_launch(words, environ={}, folder=Path("/nowhere")).job
        found = replace(found, model=replace(found.model, vision_weights=()))
        assert parameter_counts(found.model, full_model(found)).unpadded == PUBLISHED["parameters"][name]
        return
    assert counts_of(name, *NEEDED.get(name, ())).unpadded == PUBLISHED["parameters"][name] + DIFFERENCES.get(name, 0)


def test_every_model_of_the_catalogue_has_a_published_count() -> None:
    assert set(published()) == set(PUBLISHED["parameters"])


@pytest.mark.parametrize("name", FROM_FILE)
def test_from_a_configuration_file_alone(name: str, tmp_path: Path) -> None:
    assert counts_of(write_config(tmp_path, name)).unpadded == PUBLISHED["parameters"][name]
    assert counts_of(tmp_path).unpadded == PUBLISHED["parameters"][name]


@pytest.mark.parametrize("name", ["openai-community/gpt2", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("release", ["0.12.3", "0.16.1", "0.18.2", "0.19.0"])
def test_the_tokens_do_not_depend_on_the_release(name: str, release: str) -> None:
    """NullTokenizer has one token more than --vocab-size up to 0.17."""
    job = launch_of(name, "--info-megatron", release).job
    assert job.model.vocab_size == published()[name]["config"]["vocab_size"]
    assert parameter_counts(job.model, full_model(job)).unpadded == PUBLISHED["parameters"][name]


def test_the_tokens_are_right_if_an_option_of_the_launch_needs_a_later_release() -> None:
    job = launch_of("Qwen/Qwen2.5-7B", "--position-embedding-type", "yarn").job
    assert job.megatron in ("0.18.2", "0.19.0")
    assert job.model.vocab_size == 152064


@pytest.mark.parametrize("name", PUBLISHED["active_billions"])
def test_active_parameters(name: str) -> None:
    assert counts_of(name).active == pytest.approx(PUBLISHED["active_billions"][name] * 1e9, rel=0.03)


def test_mixtral_active_parameters_exactly() -> None:
    """All but 6 of 8 experts in 32 layers, each with three matrices."""
    assert counts_of("mistralai/Mixtral-8x7B-v0.1").active == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336


def test_the_mtp_layer_is_counted_on_request_only() -> None:
    """The MTP layer of DeepSeek-V3 has 11.6 billion parameters, with its projection and three norms (arXiv 2412.19437)."""
    with_mtp = analyze("--nproc-per-node 8 --info-model deepseek-ai/DeepSeek-V3 --mtp-num-layers 1", environ={}, folder="/nowhere")
    assert with_mtp.parameters_unpadded - PUBLISHED["parameters"]["deepseek-ai/DeepSeek-V3"] == 11_610_067_968
    assert "add --mtp-num-layers 1" in " ".join(with_mtp.assumptions)


def test_the_mtp_layer_is_not_advised_with_sparse_attention() -> None:
    """Megatron-LM stops in it, and --mtp-num-layers is refused."""
    said = " ".join(launch_of("deepseek-ai/DeepSeek-V3.2", "--info-megatron", "0.18.2").job.assumptions)
    assert "its MTP layer is left out; Megatron-LM stops in MTP layers with sparse attention" in said
    assert "--mtp-num-layers" not in said


@pytest.mark.parametrize(
    ("kind", "changed", "count"),
    [
        ("qwen3_next", {"mlp_only_layers": [0, 3], "num_hidden_layers": 6, "num_experts": 16, "linear_num_value_heads": 48,
                        "linear_value_head_dim": 64}, 1_064_025_376),
        ("qwen3_5_text", {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4,
                          "vocab_size": 248320}, 8_953_803_264),
        ("qwen3_5_moe_text", {"num_hidden_layers": 40, "vocab_size": 248320}, 34_660_610_688),
    ],
)  # fmt: skip
def test_models_with_linear_attention(kind: str, changed: dict[str, object], count: int, tmp_path: Path) -> None:
    """Sums of numel() over AutoModelForCausalLM.from_config of transformers 5.24.0; the last two are its default configurations."""
    base = published()["Qwen/Qwen3-Next-80B-A3B-Instruct"]["config"] if kind == "qwen3_next" else {"hidden_size": 2048}
    if kind == "qwen3_5_moe_text":
        base |= {"num_attention_heads": 16, "num_key_value_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**base, "model_type": kind, **changed}))
    assert counts_of(file).unpadded == count
